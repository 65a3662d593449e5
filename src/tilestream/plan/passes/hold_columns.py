"""Layers wider than a fragment, made block by block of their columns: a warpgroup keeps a tile of its own."""

from __future__ import annotations

from dataclasses import replace

from tilestream.ir.axes import Loop
from tilestream.ir.columns import column_axis
from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.ir.verify import WIDEST
from tilestream.kernels.stream.model import ceil_to
from tilestream.kernels.stream.places import OVERHEAD
from tilestream.kernels.stream.walk import MOST_PACKED

MOST_REGISTERS = 212
"""Of a thread, by the schedule's estimate. With 224, for 448 columns in blocks of 152, ptxas found no place
for all of them (C7512), though ``REGISTER_LIMIT`` holds elsewhere."""


def hold_columns(p: Pipeline, over: int = WIDEST[0], widest: int = WIDEST[0]) -> Pipeline:
    """Loop over the columns of what every linear makes that is wider than ``over``, and hold it until it is whole.

    Blocks are as wide as the registers allow beside the product's packed left operand, and about equally wide: an
    operand of 400 columns leaves room for 152, so a result of 400 comes in blocks of 136, 136 and 128.

    Args:
        widest: columns of a block at most.
    """
    return p.with_stages(tuple(_held(s, over, widest) for s in p.stages))


def _held(stage: Stage, over: int, widest: int) -> Stage:
    features = {op.out.name: op.out.features for op in stage.ops if op.out is not None}
    linears = [op for op in stage.ops if op.kind == "linear" and op.out is not None]
    loops = []
    for op in linears:
        if op.out is not None and op.out.features > over and op.ins[0] in features:
            width = _block(op.out.features, min(_room(features[op.ins[0]]), widest), whole=op is linears[-1])
            loops.append(Loop(column_axis(op.out.name), width, held=True))
    return replace(stage, loops=(stage.loops[0], *loops))


def _room(depth: int) -> int:
    """Columns of a block whose accumulators fit beside a left operand of ``depth`` columns in registers."""
    packed = ceil_to(depth, 16) // 4 if depth <= MOST_PACKED else 0
    return min(WIDEST[0], (MOST_REGISTERS - OVERHEAD - packed) * 2 // 8 * 8)


def _block(features: int, most: int, whole: bool) -> int:
    """Columns of about equal blocks. ``whole``: chunks of 64, which are stored in one piece, where that can be."""
    if whole and features % 64 == 0 and most >= 64:
        return ceil_to(-(-features // -(-features // (most // 64 * 64))), 64)
    return ceil_to(-(-features // -(-features // most)), 8)
