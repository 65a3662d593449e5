"""Run a shared tile on the current stream."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping
from math import ceil

import torch

from tilestream.cuda import driver
from tilestream.cuda.compile import KernelReport
from tilestream.cuda.driver import PreparedLaunch
from tilestream.cuda.pack import Where
from tilestream.cuda.shared_tile.diagnose import ExchangeDump
from tilestream.cuda.shared_tile.emit import SharedTileSource
from tilestream.cuda.shared_tile.workspace import SharedWorkspace
from tilestream.cuda.workspace import Workspaces
from tilestream.errors import DeviceError
from tilestream.ir.pipeline import DTYPE_BYTES
from tilestream.schedule.shared_tile import Tail
from tilestream.schedule.shared_tile.model import PANEL

TIMEOUT_NS = 1_000_000_000  # less than the barriers' own bound, so that who waited for whom is known


class SharedTileLaunch:
    """A kernel of a shared tile, with its workspaces. More rows than it has tiles for take several launches.

    Args:
        dependent: let its CTAs start, and load weights, while the kernel before on the stream still runs (programmatic
            dependent launch). Only where that kernel writes none of the parameters. The launch is not cooperative then:
            nothing else may run beside it that waits for CTAs of its own.

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
        if s.ctas > room:
            raise DeviceError(
                f"pipeline {source.pipeline.name!r} needs {s.row_tiles} x {s.groups} x {s.columns} = {s.ctas} CTAs at"
                f" once" + (f" in clusters of {s.cluster}" if s.cluster > 1 else "") + f" and this GPU holds {room}",
                "plan for this GPU, or use fewer groups",
            )
        self.workspaces = Workspaces(lambda: SharedWorkspace(s))
        self.dump = ExchangeDump(s, source.pipeline.name)

    def check(self) -> None:
        """Raise ``QueueTimeout`` if an earlier launch expired."""
        self.dump.check()

    def log(self) -> None:
        """Such kernels have no stamps."""

    def prepare(self, where: Mapping[str, Where], rows: int, stream: int, capture: int) -> list[PreparedLaunch]:
        """What to enqueue on ``stream`` for ``rows`` rows of the tensors at ``where``."""
        space = self.workspaces.take(stream, capture)
        most = self.schedule.row_tiles * self.schedule.tile_rows
        return [
            self.function.prepare(
                (self.schedule.ctas, 1), self.schedule.threads, stream,
                self._params(where, space, first, min(most, rows - first)), not self.dependent, self.dependent,
            )
            for first in range(0, ceil(rows / most) * most, most)
        ]  # fmt: skip

    def _params(self, where: Mapping[str, Where], space: SharedWorkspace, first: int, rows: int) -> ctypes.Array:
        """The kernel's argument for ``rows`` rows from row ``first`` on, as the template declares it."""
        s, b, types = self.schedule, self.schedule.block, self._dtypes()
        k, hid, out = b.sizes

        def from_row(name: str) -> tuple[int, int, int]:
            """Address, elements and bytes from row to row."""
            address, stride, _ = where[name]
            return address + first * stride * DTYPE_BYTES[types[name]], stride, stride * DTYPE_BYTES[types[name]]

        def weight(name: str, columns: int, height: int, box: int) -> bytes:
            address, stride, _ = where[name]
            return driver.tensor_map(b.dtype, address, columns, height, stride * 2, box)

        x, _, x_bytes = (space.operand, k, 2 * k) if b.before else from_row(b.input)
        y, y_stride, y_bytes = from_row(b.output)
        middle_rows = s.row_tiles * s.groups * s.tile_rows
        box_rows = min(rows, s.tile_rows)
        maps = [
            driver.tensor_map(b.dtype, x, k, rows, x_bytes, box_rows),
            *(weight(f.weight, k, self._height(f.weight), s.middle_columns) for f in b.firsts),
            weight(b.second, hid, out, s.out_columns),
            driver.tensor_map(
                b.dtype, space.middle, s.group_columns, middle_rows, s.group_columns * 2, box_rows
            ),
            driver.tensor_map(b.output_dtype, y, out, rows, y_bytes, min(PANEL, s.tile_rows), self.source.add_width)
            if s.tail is Tail.REDUCE_ADD
            else bytes(driver.MAP_BYTES),
        ]  # fmt: skip
        views = [*(v.view for v in self.source.vectors), *self.source.row_vectors]
        vectors = [where[v.of][0] for v in views] or [0]
        residuals = [from_row(op.params[0]) for op in b.loads] or [(0, 0, 0)]
        words = [*vectors, *(r[0] for r in residuals), *(r[1] for r in residuals)]
        words += [space.middle, space.operand, y, space.partial, y_stride, space.flags, self.dump.address, TIMEOUT_NS]
        packed = b"".join(maps) + struct.pack(f"<{len(words)}Qii", *words, rows, box_rows)
        packed += bytes(-len(packed) % 64)
        return (ctypes.c_char * len(packed)).from_buffer_copy(packed)

    def _dtypes(self) -> dict[str, str]:
        return {t.name: t.dtype for t in self.source.pipeline.tensors}

    def _height(self, name: str) -> int:
        return self.source.pipeline.tensor(name).shape[0]
