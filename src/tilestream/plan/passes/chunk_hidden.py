"""Hidden layers that no fragment holds, made and consumed by chunks of their columns."""

from __future__ import annotations

from dataclasses import replace

from tilestream.ir.axes import Loop
from tilestream.ir.columns import LoopedLayer, hidden_layers
from tilestream.ir.pipeline import Pipeline, Stage, TileOp
from tilestream.ir.verify import WIDEST

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
