"""The family of tiled blocks: tiles of one or two products dealt over the grid."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tilestream.devices import Device
from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.ir.plain import plain
from tilestream.kernels.costs import ClosedForm, LaunchCost
from tilestream.kernels.kernel import Footprint, Frame, Kernel, halves
from tilestream.kernels.parts.source import Call, KernelSource, Space
from tilestream.kernels.product.tiled_block.cost import tiled_block_cost
from tilestream.kernels.product.tiled_block.emit import emit
from tilestream.kernels.product.tiled_block.model import CLUSTER, THREADS, TiledBlock, build, space
from tilestream.kernels.product.tiled_block.params import pack
from tilestream.kernels.shape import KernelShape, shape_of
from tilestream.kernels.stream.layout import SHARED_LIMIT

WAITED_FOR = ("the readers of a slot", "the hidden layer", "", "the operand")


class TiledBlockKernel(Kernel):
    """The kernel of a launch of one stage whose products are tiles dealt over the grid."""

    family = "tiled block"
    closed_form = ClosedForm("tiled blocks", 0.03, "the six blocks that it was fitted on")

    @classmethod
    def matches(cls, launch: Pipeline) -> bool:
        return shape_of(launch) is KernelShape.TILED_BLOCK

    def within(self, limit: int) -> TiledBlock:
        """Its schedule within ``limit`` bytes of shared memory; raises as ``model.build``."""
        written = plain(self.launch)
        return build(written.stages[0], written, limit)

    @cached_property
    def schedule(self) -> TiledBlock:
        return self.within(SHARED_LIMIT)

    def check(self) -> None:
        self.within(SHARED_LIMIT)

    def footprint(self, stage: Stage, limit: int) -> Footprint:
        s = self.within(limit)
        return Footprint(s.shared_bytes, s.registers, s.parts)

    def cost(self, rows: int, device: Device) -> LaunchCost:
        made = tiled_block_cost(self.within(device.shared_bytes_per_cta), rows, device)
        return LaunchCost(
            self.launch.name, (), made.products_s, made.dram_s, 0.0, made.epilogues_s, made.total_s, made.limit
        )

    def _emit(self, stamped: bool, annotate: bool) -> KernelSource:
        return emit(self.launch)

    @cached_property
    def frame(self) -> Frame:
        s = self.schedule
        return Frame(s.ctas, f"{s.clusters} x {CLUSTER} = {s.ctas}", THREADS, CLUSTER)

    @cached_property
    def space(self) -> Space:
        return space(self.schedule)

    def pack(self, source: KernelSource, call: Call) -> bytes:
        return pack(source, call)

    def describe(self, words: Sequence[int]) -> str:
        (_, phase), (cta, tile), (sm, _) = halves(words, 3)
        return (
            f"pipeline {self.launch.name!r}: CTA {cta} of {self.schedule.ctas} on SM {sm} waited too long for"
            f" {WAITED_FOR[phase]} of row tile {tile}: expected ticket {words[3]}, found {words[4]}"
        )

    def hosted(self, rows: int, sanitize: bool) -> str:
        """As of a shared tile."""
        return "the host build runs a block with nothing in front of its first layer" * bool(self.schedule.block.before)
