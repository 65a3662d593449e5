"""Run a stationary sum on the current stream."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tilestream.cuda import driver
from tilestream.cuda.compile import KernelReport
from tilestream.cuda.diagnose_stationary import SumDump
from tilestream.cuda.driver import PreparedLaunch
from tilestream.cuda.workspace import Memory, Workspaces
from tilestream.errors import DeviceError
from tilestream.kernels.gradients.stationary.argument import Addresses, pack
from tilestream.kernels.gradients.stationary.emit import THREADS, StationarySource
from tilestream.kernels.parts.params import LINE_BYTES, Where


class StationaryLaunch:
    """A kernel of stationary sums, with its workspaces.

    Raises:
        DeviceError: its CTAs, which wait for each other, do not fit the GPU at once.
    """

    needs_rows = False
    """The gradient of an empty batch is zero, and is written."""

    def __init__(self, source: StationarySource, report: KernelReport, device: torch.device) -> None:
        self.source, self.report, self.device = source, report, device
        driver.ensure_context(device.index or 0)
        self.function = driver.Function(report.cubin, source.name, source.shared_bytes)
        sms = torch.cuda.get_device_properties(device).multi_processor_count
        room = self.function.blocks_per_sm(THREADS) * sms
        if source.ctas > room:
            raise DeviceError(
                f"pipeline {source.pipeline.name!r} needs {' + '.join(str(s.ctas) for s in source.schedules)} ="
                f" {source.ctas} CTAs at once and this GPU holds {room}",
                "plan for this GPU, or use fewer splits",
            )
        self.flag_bytes = source.ctas * LINE_BYTES
        self.workspaces = Workspaces(lambda: Memory(self.flag_bytes + source.partial_bytes))
        self.dump = SumDump(source.schedules, source.pipeline.name)

    def check(self) -> None:
        """Raise ``QueueTimeout`` if an earlier launch expired."""
        self.dump.check()

    def log(self) -> None:
        """Such kernels have no stamps."""

    def prepare(self, where: Mapping[str, Where], rows: int, stream: int, capture: int) -> list[PreparedLaunch]:
        """What to enqueue on ``stream`` for ``rows`` rows of the tensors at ``where``."""
        space = self.workspaces.take(stream, capture)
        at = Addresses(space.address, space.address + self.flag_bytes, self.dump.address)
        params = pack(self.source, where, at, rows, driver.tensor_map)
        return [self.function.prepare((self.source.ctas, 1), THREADS, stream, params, cooperative=True)]
