"""Run a shared tile on the current stream."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil

import torch

from tilestream.cuda import driver
from tilestream.cuda.compile import KernelReport
from tilestream.cuda.diagnose_shared_tile import ExchangeDump
from tilestream.cuda.driver import PreparedLaunch
from tilestream.cuda.workspace import Memory, Workspaces
from tilestream.errors import DeviceError
from tilestream.kernels.parts.params import Where
from tilestream.kernels.product.shared_tile.emit import SharedTileSource
from tilestream.kernels.product.shared_tile.params import Part, Space, params


class SharedTileLaunch:
    """A kernel of a shared tile, with its workspaces. More rows than it has tiles for take several launches, unless its
    CTAs are alone: then a launch has as many as there are tiles, and they need not be resident at once.

    Args:
        dependent: let its CTAs start, and load weights, while the kernel before on the stream still runs (programmatic
            dependent launch). Only where that kernel writes none of the parameters.

    Raises:
        DeviceError: its CTAs do not fit the GPU at once.
    """

    needs_rows = True

    def __init__(
        self, source: SharedTileSource, report: KernelReport, device: torch.device, dependent: bool = False
    ) -> None:
        self.source, self.report, self.device, self.dependent = source, report, device, dependent
        self.schedule = s = source.schedule
        driver.ensure_context(device.index or 0)
        self.function = driver.Function(report.cubin, source.name, source.shared_bytes, s.cluster)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        if s.cluster > 1:
            room = self.function.resident_clusters(s.threads, s.cluster) * s.cluster
        else:
            room = self.function.blocks_per_sm(s.threads) * sms
        if s.ctas > room and not (s.alone and room):
            raise DeviceError(
                f"pipeline {source.pipeline.name!r} needs {s.row_tiles} x {s.groups} x {s.columns} = {s.ctas} CTAs at"
                f" once" + (f" in clusters of {s.cluster}" if s.cluster > 1 else "") + f" and this GPU holds {room}",
                "plan for this GPU, or use fewer groups",
            )
        self.workspaces = Workspaces(lambda: Memory(Space.of(s).total))
        self.dump = ExchangeDump(s, source.pipeline.name)

    def check(self) -> None:
        """Raise ``QueueTimeout`` if an earlier launch expired."""
        self.dump.check()

    def log(self) -> None:
        """Such kernels have no stamps."""

    def prepare(self, where: Mapping[str, Where], rows: int, stream: int, capture: int) -> list[PreparedLaunch]:
        """What to enqueue on ``stream`` for ``rows`` rows of the tensors at ``where``."""
        space = self.workspaces.take(stream, capture)
        s = self.schedule
        most = max(rows, 1) if s.alone else s.row_tiles * s.tile_rows
        parts = [Part(first, min(most, rows - first), rows) for first in range(0, ceil(rows / most) * most, most)]
        return [
            self.function.prepare(
                (s.launched(part.rows), 1), s.threads, stream, self._params(where, space, part),
                not s.alone, self.dependent,
            )
            for part in parts
        ]  # fmt: skip

    def _params(self, where: Mapping[str, Where], space: Memory, part: Part) -> bytes:
        return params(self.source, where, space.address, self.dump.address, driver.MAPS, part)
