"""Which kernel shape a stage needs, asked of derived facts alone."""

from __future__ import annotations

from enum import StrEnum

from tilestream.ir.axes import Level
from tilestream.ir.derive import exchanges, sums
from tilestream.ir.once import once
from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.ir.plain import by_rows, plain
from tilestream.kernels.product.tiled_block import model as tiled_block


class KernelShape(StrEnum):
    """What is summed over a loop, and where workers exchange, make five shapes; and a tile of rows whose columns CTAs
    divide is shared although they exchange nothing.

    ========================================  ==========================  ============  ==============
    summed over a loop                        no exchange, or in the CTA  DSM           L2 or memory
    ========================================  ==========================  ============  ==============
    nothing                                   row stream, shared tile     shared tile   shared tile
    an inner loop (hidden columns, taps)      chunked contraction         shared tile   shared tile
    the outermost (rows; hidden, few rows)    one CTA                     shared tile   stationary sum
    ========================================  ==========================  ============  ==============

    A stationary sum that has row streams beside it in its stage is a backward chain (``kernels.gradients``).
    Where columns that the grid divides are looped over besides, a worker has several tiles of each product: a tiled
    block.
    """

    ROW_STREAM = "row stream"
    CHUNKED_CONTRACTION = "chunked contraction"
    SHARED_TILE = "shared tile"
    ONE_CTA = "one CTA"
    STATIONARY_SUM = "stationary sum"
    TILED_BLOCK = "tiled block"


@once
def kernel_shape(stage: Stage) -> KernelShape:
    """The shape of a stage whose ops are in plain form (``ir.plain``)."""
    looped = [loop.axis for loop in stage.loops]
    summed = {a for op in stage.ops if op.out is not None for a in sums(op) if a in looped}
    levels = {e.level for e in exchanges(stage)} - {Level.WARPGROUP}
    # Sums of one loop that every CTA has a part of meet in memory.
    apart = any(d.level is Level.GRID and not summed.isdisjoint(d.axes) for d in stage.mesh)
    into_memory = apart or any(op.kind == "store_add" for op in stage.ops)
    if Level.CLUSTER in levels:
        return KernelShape.SHARED_TILE
    if tiled_block.is_tiled(stage) and (Level.GRID in levels or not (levels or into_memory or summed)):
        return KernelShape.TILED_BLOCK
    if summed and looped[0] in summed:
        return KernelShape.STATIONARY_SUM if levels or into_memory else KernelShape.ONE_CTA
    if levels or into_memory or _columns_apart(stage, looped):
        return KernelShape.SHARED_TILE
    return KernelShape.CHUNKED_CONTRACTION if summed else KernelShape.ROW_STREAM


def _columns_apart(stage: Stage, looped: list[str]) -> bool:
    """Whether CTAs of the grid have columns of one tile of rows each, which exchanges nothing."""
    return any(d.level is Level.GRID and d.size > 1 and d.axes and d.axes[0] not in looped for d in stage.mesh)


def shape_of(launch: Pipeline) -> KernelShape | None:
    """The shape of a launch of one stage that is not written in ops of rows; None of any other."""
    if len(launch.stages) != 1 or by_rows(launch):
        return None
    return kernel_shape(plain(launch).stages[0])
