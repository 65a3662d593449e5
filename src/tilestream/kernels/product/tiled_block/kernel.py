"""The family of tiled blocks: tiles of one or two products dealt over the grid."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tilestream.devices import Device
from tilestream.kernels.costs import ClosedForm, Counts
from tilestream.kernels.kernel import Frame, halves
from tilestream.kernels.product.kernel import ProductKernel
from tilestream.kernels.product.tiled_block.code import TiledBlockCode
from tilestream.kernels.product.tiled_block.cost import tiled_block_cost
from tilestream.kernels.product.tiled_block.model import CLUSTER, THREADS, TiledBlock, build
from tilestream.kernels.shape import KernelShape

WAITED_FOR = ("the readers of a slot", "the hidden layer", "", "the operand")


class TiledBlockKernel(ProductKernel[TiledBlock]):
    """The kernel of a launch of one stage whose products are tiles dealt over the grid."""

    shape = KernelShape.TILED_BLOCK
    build, code = build, TiledBlockCode
    family = "tiled block"
    closed_form = ClosedForm("tiled blocks", 0.03, "the six blocks that it was fitted on")

    def cost(self, rows: int, device: Device) -> Counts:
        return tiled_block_cost(self.within(device.shared_bytes_per_cta), rows, device)

    @cached_property
    def frame(self) -> Frame:
        s = self.schedule
        return Frame(s.ctas, f"{s.clusters} x {CLUSTER} = {s.ctas}", THREADS, CLUSTER)

    def describe(self, words: Sequence[int]) -> str:
        (_, phase), (cta, tile), (sm, _) = halves(words, 3)
        return (
            f"pipeline {self.launch.name!r}: CTA {cta} of {self.schedule.ctas} on SM {sm} waited too long for"
            f" {WAITED_FOR[phase]} of row tile {tile}: expected ticket {words[3]}, found {words[4]}"
        )
