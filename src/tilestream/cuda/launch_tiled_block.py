"""Run a tiled block on the current stream."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from tilestream.cuda import driver
from tilestream.cuda.compile import KernelReport
from tilestream.cuda.diagnose import Record
from tilestream.cuda.driver import PreparedLaunch
from tilestream.cuda.workspace import Memory, Workspaces
from tilestream.errors import DeviceError
from tilestream.kernels.parts.params import Where
from tilestream.kernels.product.tiled_block.emit import TiledBlockSource
from tilestream.kernels.product.tiled_block.model import CLUSTER, THREADS, TiledBlock, space_bytes
from tilestream.kernels.product.tiled_block.params import params

WORDS = 8  # 64-bit words; struct ExchangeDump of collectives.cuh
WAITED_FOR = ("the readers of a slot", "the hidden layer", "", "the operand")


class TiledDump(Record):
    """Which CTA waited for which tile of rows."""

    def __init__(self, schedule: TiledBlock, pipeline: str) -> None:
        super().__init__(WORDS)
        self.schedule, self.pipeline = schedule, pipeline

    def describe(self) -> str:
        half = self.halves(3)
        phase, cta, tile, sm = half[0][1], half[1][0], half[1][1], half[2][0]
        return (
            f"pipeline {self.pipeline!r}: CTA {cta} of {self.schedule.ctas} on SM {sm} waited too long for"
            f" {WAITED_FOR[phase]} of row tile {tile}: expected ticket {int(self.words[3])}, found {int(self.words[4])}"
        )


class TiledBlockLaunch:
    """A kernel of a tiled block, with its workspaces.

    Raises:
        DeviceError: its clusters do not fit the GPU at once.
    """

    needs_rows = True

    def __init__(self, source: TiledBlockSource, report: KernelReport, device: torch.device) -> None:
        self.source, self.report, self.device = source, report, device
        s = source.schedule
        driver.ensure_context(device.index or 0)
        self.function = driver.Function(report.cubin, source.name, source.shared_bytes, CLUSTER)
        room = self.function.resident_clusters(THREADS, CLUSTER)
        if s.clusters > room:
            raise DeviceError(
                f"pipeline {source.pipeline.name!r} needs {s.clusters} clusters of {CLUSTER} CTAs at once and this GPU"
                f" holds {room}",
                "plan for this GPU (options device=None)",
            )
        self.workspaces = Workspaces(lambda: Memory(sum(space_bytes(s))))
        self.dump = TiledDump(s, source.pipeline.name)

    def check(self) -> None:
        """Raise ``QueueTimeout`` if an earlier launch expired."""
        self.dump.check()

    def log(self) -> None:
        """Such kernels have no stamps."""

    def prepare(self, where: Mapping[str, Where], rows: int, stream: int, capture: int) -> list[PreparedLaunch]:
        """What to enqueue on ``stream`` for ``rows`` rows of the tensors at ``where``."""
        space = self.workspaces.take(stream, capture)
        argument = params(self.source, where, space.address, self.dump.address, driver.tensor_map, rows)
        return [self.function.prepare((self.source.schedule.ctas, 1), THREADS, stream, argument, cooperative=True)]
