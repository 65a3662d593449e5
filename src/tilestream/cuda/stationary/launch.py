"""Run a stationary sum on the current stream."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping

import torch

from tilestream.cuda import driver
from tilestream.cuda.compile import KernelReport
from tilestream.cuda.driver import PreparedLaunch
from tilestream.cuda.pack import Where
from tilestream.cuda.stationary.diagnose import SumDump
from tilestream.cuda.stationary.emit import THREADS, StationarySource
from tilestream.cuda.stationary.workspace import SumWorkspace
from tilestream.cuda.workspace import Workspaces
from tilestream.errors import DeviceError
from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS, Role

TIMEOUT_NS = 1_000_000_000  # less than the barriers' own bound, so that who waited for whom is known


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
        self.workspaces = Workspaces(lambda: SumWorkspace(source))
        self.dump = SumDump(source.schedules, source.pipeline.name)

    def check(self) -> None:
        """Raise ``QueueTimeout`` if an earlier launch expired."""
        self.dump.check()

    def log(self) -> None:
        """Such kernels have no stamps."""

    def prepare(self, where: Mapping[str, Where], rows: int, stream: int, capture: int) -> list[PreparedLaunch]:
        """What to enqueue on ``stream`` for ``rows`` rows of the tensors at ``where``."""
        space = self.workspaces.take(stream, capture)
        params = self._params(where, space, rows)
        return [self.function.prepare((self.source.ctas, 1), THREADS, stream, params, cooperative=True)]

    def _params(self, where: Mapping[str, Where], space: SumWorkspace, rows: int) -> ctypes.Array:
        """The kernel's argument, as the template declares it."""
        maps = []
        # The kernel reads nothing where there are no rows, and there is no tensor map of none.
        for name in self.source.maps if rows else ():
            (address, stride, _), tensor = where[name], self.source.pipeline.tensor(name)
            size = DTYPE_BYTES[tensor.dtype]
            height = tensor.shape[0] if tensor.role is Role.PARAMETER else rows
            maps.append(driver.tensor_map(tensor.dtype, address, tensor.features, height, stride * size, TILE_ROWS))
        pointers = [where[name] for name in self.source.pointers]
        packed = b"".join(maps).ljust(max(len(self.source.maps), 1) * driver.MAP_BYTES, b"\0")
        packed += struct.pack(f"<{len(pointers)}Q", *(at.address for at in pointers))
        packed += struct.pack(f"<{len(pointers)}q", *(at.stride for at in pointers))
        packed += struct.pack("<QQQQii", space.flags, self.dump.address, TIMEOUT_NS, space.partials, rows, 0)
        packed += bytes(-len(packed) % 64)
        return (ctypes.c_char * len(packed)).from_buffer_copy(packed)
