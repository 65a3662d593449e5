"""Which kernel shape a stage needs, asked of derived facts alone, and why there is none for it yet."""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum

from tilestream.errors import VerifyError
from tilestream.ir.axes import ROWS, Level
from tilestream.ir.derive import exchanges, result_axes, sums
from tilestream.ir.once import once
from tilestream.ir.pipeline import TILE_ROWS, Pipeline, Stage, Transport
from tilestream.ir.plain import by_rows, plain
from tilestream.kernels.gradients import backward, stationary
from tilestream.kernels.product.shared_tile import build
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

    A stationary sum that has row streams beside it in its stage is a backward chain (``kernels.gradients.backward``).
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


def _why_not(build: Callable[[], object]) -> str:
    try:
        build()
    except VerifyError as error:
        return error.cause
    return ""


def is_shared_tile(pipeline: Pipeline) -> bool:
    """Whether a launch is one stage that shares a tile over its CTAs, which has kernels of its own."""
    return _is_one(KernelShape.SHARED_TILE, pipeline)


def is_tiled_block(pipeline: Pipeline) -> bool:
    """Whether a launch is one stage whose products are tiles dealt over the grid, which has kernels of its own."""
    return _is_one(KernelShape.TILED_BLOCK, pipeline)


def _is_one(shape: KernelShape, pipeline: Pipeline) -> bool:
    if len(pipeline.stages) != 1 or by_rows(pipeline):
        return False
    return kernel_shape(plain(pipeline).stages[0]) is shape


def why_no_kernel(pipeline: Pipeline) -> str:
    """Why no kernel can be made of ``pipeline`` yet; empty if one can, as far as axes go. Widths are the schedule's."""
    for q in pipeline.queues:
        if q.transport is Transport.DSM:
            return f"the queue of {q.tile!r} is in distributed shared memory: kernels have rings in the L2"
    if by_rows(pipeline):
        odd = next((s for s in pipeline.stages if s.tile_rows != TILE_ROWS), None)
        return f"stage {odd.name!r} takes {odd.tile_rows} rows a tile, kernels {TILE_ROWS}" if odd is not None else ""
    one = plain(pipeline)
    if is_shared_tile(pipeline):
        return _why_not(lambda: build(one.stages[0], one))
    if is_tiled_block(pipeline):
        return _why_not(lambda: tiled_block.build(one.stages[0], one))
    if stationary.is_stationary(pipeline):
        return _why_not(lambda: stationary.builds(pipeline))
    if backward.is_backward(pipeline):
        return _why_not(lambda: backward.build(pipeline))
    for stage in one.stages:
        shape = kernel_shape(stage)
        if shape is KernelShape.CHUNKED_CONTRACTION:
            return (
                f"stage {stage.name!r} is a {shape}: its kernels are made from ops of rows (plan.passes.chunk_hidden)"
            )
        if shape is not KernelShape.ROW_STREAM:
            return f"stage {stage.name!r} is a {shape}: only a row stream has a kernel so far"
        for op in stage.ops:
            where = op.source or f"{op.kind} in stage {stage.name!r}"
            if any(at.index for v in op.views for at in v.at or ()):
                return f"{where}: a gather or a scatter by index has no kernel so far"
            others = [a for a in result_axes(op) if a != ROWS.name]
            if len(others) > 1 or any(at.strides or len(at.axes) > 1 for v in op.views for at in v.at or ()):
                return f"{where}: tiles are rows by columns in kernels so far"
        if [loop.axis for loop in stage.loops] != [ROWS.name]:
            return f"stage {stage.name!r} loops over {', '.join(loop.axis for loop in stage.loops) or 'nothing'}"
    return "its ops have coordinates: kernels are made from ops of rows (linear, cat, layer_norm)"
