"""Other forms of a stage: hidden layers by chunks, wide layers by blocks of columns, rows loaded by who computes."""

from __future__ import annotations

from dataclasses import replace

from tilestream.errors import VerifyError
from tilestream.ir.axes import Loop
from tilestream.ir.columns import LoopedLayer, column_axis, hidden_layers
from tilestream.ir.pipeline import Pipeline, Stage, TileOp
from tilestream.ir.verify import WIDEST
from tilestream.kernels.stream.model import ceil_to
from tilestream.kernels.stream.places import OVERHEAD
from tilestream.kernels.stream.walk import MOST_PACKED

CHUNK = 64
"""Columns a turn: 32 accumulators and 16 packed registers, which leaves room for a sum of 256 columns."""


def chunk_hidden(p: Pipeline, over: int = WIDEST[0], chunk: int = CHUNK) -> Pipeline:
    """Loop over the columns of every hidden layer wider than ``over``: ``y += act(x W1[chunk]) W2[chunk]``.

    But for those whose sum no fragment holds.

    The layer never leaves the registers, and a warpgroup keeps a tile of its own however wide it is. Equal blocks one
    after another become short loops of code (four blocks of 192-384-192: 23,000 instructions whole).
    """
    handed_on = [q.tile for q in p.queues]
    return p.with_stages(tuple(_chunked(s, handed_on, over, chunk) for s in p.stages))


def _chunked(stage: Stage, handed_on: list[str], over: int, chunk: int) -> Stage:
    layers = [layer for layer in hidden_layers(stage, handed_on) if layer.features > over and _summed(layer)]
    loops = (stage.loops[0], *(Loop(layer.axis, chunk) for layer in layers))
    return replace(stage, loops=loops, ops=_beside_readers(stage.ops, layers))


def _summed(layer: LoopedLayer) -> bool:
    return layer.reader.out is not None and layer.reader.out.features <= WIDEST[0]


def _beside_readers(ops: tuple[TileOp, ...], layers: list[LoopedLayer]) -> tuple[TileOp, ...]:
    """Every layer's ops directly before the linear that reads it. What they read was made before them."""
    moved = {op for layer in layers for op in layer.ops}
    before = {layer.reader: layer.ops for layer in layers}
    return tuple(o for op in ops if op not in moved for o in (*before.get(op, ()), op))


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


def load_directly(p: Pipeline) -> Pipeline:
    """``own=1`` at every load through an index.

    Raises:
        VerifyError: there is none: the pipeline would be the same.
    """
    if not any(op.index for s in p.stages for op in s.ops):
        raise VerifyError("no rows come through an index", "use it for gathers")
    return p.with_stages(tuple(_direct(s) for s in p.stages))


def _direct(stage: Stage) -> Stage:
    def own(op: TileOp) -> TileOp:
        return replace(op, attrs=(*op.attrs, ("own", 1))) if op.index else op

    return replace(stage, ops=tuple(map(own, stage.ops)))
