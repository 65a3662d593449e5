"""Layers of a row stage whose columns are looped: `Loop("a.c", 64)` takes 64 columns of what makes ``a`` a turn.

A looped layer is one linear, or several of the same width (a gate and what it gates), and what follows element by
element. Where one linear alone reads its result, that linear sums over the loop: ``y += act(x W1[chunk]) W2[chunk]``,
and the layer is never whole. Which ops those are is found here; a stage names the loops and no more.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from tilestream.ir.axes import Loop
from tilestream.ir.pipeline import Stage, TileOp
from tilestream.ir.tileops import FIRST, OPS
from tilestream.ir.ways import reached


def is_part(op: TileOp) -> bool:
    return op.attr(FIRST) is not None


def first_column(op: TileOp) -> int:
    """Where the part of the columns begins that a linear makes, or a store writes; 0 where it is all of them."""
    return int(op.attr(FIRST, 0) or 0)


@dataclass(frozen=True)
class LoopedLayer:
    """Columns that a loop over ``axis`` makes chunk by chunk.

    Attributes:
        ops: the linears and the elementwise ops between their results and ``tile``, in the stage's order.
        tile: what leaves the loop.
        reader: the linear that sums over the columns.
    """

    axis: str
    ops: tuple[TileOp, ...]
    tile: str
    features: int
    reader: TileOp

    @property
    def linears(self) -> tuple[TileOp, ...]:
        return tuple(op for op in self.ops if op.kind == "linear")

    @property
    def names(self) -> frozenset[str]:
        """Of the tiles that are never whole."""
        return frozenset(op.out.name for op in self.ops if op.out is not None)


def column_axis(tile: str) -> str:
    """The name of a tile's columns, where they are written out (``ir.plain``) and where they are looped."""
    return f"{tile}.c"


def hidden_layers(stage: Stage, handed_on: Collection[str] = ()) -> tuple[LoopedLayer, ...]:
    """Every layer of ``stage`` that can be made and consumed by chunks of its columns, in the order of their readers.

    Args:
        handed_on: tiles that queues take: those are whole.
    """
    made = stage.makers
    users: dict[str, list[TileOp]] = {}
    for op in stage.ops:
        for name in op.ins:
            users.setdefault(name, []).append(op)
    found: list[LoopedLayer] = []
    taken: set[str] = set()
    for reader in stage.ops:
        if reader.kind != "linear" or reader.ins[0] not in made:
            continue
        tile = reader.ins[0]
        names = _columns_behind(tile, made)
        inside = [op for op in stage.ops if op.out is not None and op.out.name in names]
        alone = all(u is reader or u in inside for n in names for u in users[n])
        linears = [op for op in inside if op.kind == "linear"]
        if not linears or not alone or not names.isdisjoint(handed_on) or not names.isdisjoint(taken):
            continue
        if not taken.isdisjoint(n for op in linears for n in op.ins):
            continue  # what a chunk is made from must be whole
        axis = column_axis(linears[0].made.name)
        found.append(LoopedLayer(axis, tuple(inside), tile, linears[0].made.features, reader))
        taken |= names
    return tuple(found)


def looped_layers(stage: Stage) -> tuple[LoopedLayer, ...]:
    """The layers whose columns ``stage`` loops over."""
    looped = {loop.axis for loop in stage.loops[1:] if not loop.held}
    return tuple(layer for layer in hidden_layers(stage) if layer.axis in looped) if looped else ()


def blocked_tiles(ops: Sequence[TileOp], loops: Sequence[Loop]) -> dict[str, int]:
    """Tiles that are made block by block and held until they are whole, each with the columns of a block.

    ``Loop("a.c", 128, held=True)`` is over the columns of a linear ``a``. Ops that follow element by element are made
    in the same blocks.
    """
    widths = {loop.axis: loop.tile for loop in loops if loop.held}
    found: dict[str, int] = {}
    for op in ops if widths else ():
        if op.out is None:
            continue
        if op.kind == "linear":
            width = widths.get(column_axis(op.out.name), 0)
        else:
            follows = OPS[op.kind].family in ("unary", "binary", "norm") and op.out.features > 1
            width = next((found[i] for i in op.ins if i in found), 0) if follows else 0
        if width:
            found[op.out.name] = width
    return found


def _columns_behind(tile: str, made: dict[str, TileOp]) -> frozenset[str]:
    """Tiles that ``tile`` is made of element by element, back to linears; none where it is made of anything else."""
    names = reached([tile], lambda name: made[name].ins if name in made and made[name].kind != "linear" else ())
    ops = [made[name] for name in names if name in made]
    alike = all(op.made.features == made[tile].made.features for op in ops)
    by_element = all(OPS[op.kind].family in ("linear", "unary", "binary") for op in ops)
    return frozenset(names) if len(ops) == len(names) and alike and by_element else frozenset()
