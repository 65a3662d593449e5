"""The table of families of kernels. This is the one place that tells them apart: a new family is a line here."""

from __future__ import annotations

from tilestream.ir.once import once
from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.kernels.gradients.kernel import GradientKernel
from tilestream.kernels.kernel import Footprint, Kernel
from tilestream.kernels.one_row.kernel import OneRowKernel
from tilestream.kernels.product.shared_tile.kernel import SharedTileKernel
from tilestream.kernels.product.tiled_block.kernel import TiledBlockKernel
from tilestream.kernels.segments.kernel import SegmentsKernel
from tilestream.kernels.stream.kernel import RowStream
from tilestream.kernels.stream.layout import SHARED_LIMIT

FAMILIES: tuple[type[Kernel], ...] = (
    SegmentsKernel, OneRowKernel, SharedTileKernel, TiledBlockKernel, GradientKernel, RowStream,
)  # fmt: skip
"""The first that matches a launch takes it; row streams take, or refuse, what is left."""


@once
def kernel_of(launch: Pipeline) -> Kernel:
    """The kernel that a launch becomes, matched once for each launch; ``refusal`` says why none can be made of it."""
    return next(family for family in FAMILIES if family.matches(launch))(launch)


def why_no_kernel(pipeline: Pipeline) -> str:
    """Why no kernel can be made of ``pipeline`` yet; empty if one can."""
    return kernel_of(pipeline).refusal


def footprint(stage: Stage, pipeline: Pipeline, limit: int = SHARED_LIMIT) -> Footprint:
    """``Kernel.footprint`` of a stage of a launch."""
    return kernel_of(pipeline).footprint(stage, limit)
