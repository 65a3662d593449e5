"""What follows from a stage whose ops have explicit views (``ir.plain``): how tiles lie over its mesh, what is
exchanged, the nest of its loops, what is held whole. Nothing here knows a strategy by name.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from tilestream.ir.axes import Level, Spread, View, around
from tilestream.ir.pipeline import DTYPE_BYTES, Stage, Tile, TileOp

WRITES = ("store", "store_add")
"""Ops that write to memory: the last of their tensors."""


@dataclass(frozen=True)
class Shard:
    """Each worker has its part of ``axis``."""

    axis: str


@dataclass(frozen=True)
class Partial:
    """Each worker has a result of its own; ``combine`` of all is the value."""

    combine: str


@dataclass(frozen=True)
class Replicate:
    """All workers have the same."""


Placement = Shard | Partial | Replicate


def sums(op: TileOp) -> frozenset[str]:
    """Axes that an op sums over: its operands have them, its result lacks them."""
    return op.mentions.difference(op.result_axes)


def divided(op: TileOp, d: Spread, stage: Stage) -> str:
    """The axis along which ``d`` divides ``op``; empty if all its workers do the same.

    A direction over the axis around a ragged one divides what has the ragged one: edges go with their nodes.
    """
    found = around(op.mentions, stage.outer)
    return next((a for a in d.axes if a in found), "")


def placement(maker: TileOp, d: Spread, stage: Stage) -> Placement:
    """How the tile that ``maker`` makes lies over ``d``."""
    axis = divided(maker, d, stage)
    if not axis:
        return Replicate()
    return Shard(axis) if axis in around(maker.result_axes, stage.outer) else Partial(maker.combine)


def wanted(op: TileOp, view: View, tile: Tile, d: Spread, stage: Stage) -> Placement:
    """How ``op`` needs an operand over ``d``: its part of the axis that the op is divided along, else whole.

    A tile read under another name keeps its placement where both names are cut alike: by the same directions, neither
    in a loop, and without an offset.
    """
    axis = divided(op, d, stage)
    if not axis:
        return Replicate()
    looped = {loop.axis for loop in stage.loops}
    for own, at in zip(tile.axes, view.at or (), strict=True):
        if axis not in around(at.axes, stage.outer):
            continue
        if axis not in at.axes:
            return Shard(axis)  # the part of a ragged dimension that lies within a worker's positions
        plain = at.axes == (axis,) and not (at.offset or at.index or at.strides)
        cut_alike = all((own.name in x.axes) == (axis in x.axes) for x in stage.mesh)
        return Shard(own.name if plain and cut_alike and {own.name, axis}.isdisjoint(looped) else axis)
    return Replicate()


COLLECTIVES: Mapping[tuple[type, type], str] = {
    (Shard, Replicate): "all-gather",
    (Partial, Replicate): "all-reduce",
    (Partial, Shard): "reduce-scatter",
    (Shard, Shard): "all-to-all",
}

PARTIAL_BYTES = 4
"""An element of a partial result travels in fp32, everything else in its dtype."""


def collective(have: Placement, want: Placement) -> str:
    """What moves between the workers of a direction; empty if nothing does."""
    return "" if have == want else COLLECTIVES.get((type(have), type(want)), "")


def element_bytes(tile: Tile, have: Iterable[Placement]) -> int:
    """Of an element of ``tile`` on its way from workers that have it so; a part of a softmax goes with its weight."""
    partial = [h.combine for h in have if isinstance(h, Partial)]
    return PARTIAL_BYTES * (1 + ("softmax" in partial)) if partial else DTYPE_BYTES[tile.dtype]


@dataclass(frozen=True)
class Exchange:
    """One collective: ``op`` wants ``tile`` otherwise than it lies over a direction at ``level``."""

    op: TileOp
    tile: str
    level: Level
    how: str


def exchange(op: TileOp, view: View, maker: TileOp, d: Spread, stage: Stage) -> str:
    """What moves over ``d`` so that ``op`` can read ``view`` of what ``maker`` makes; empty if nothing does."""
    how = collective(placement(maker, d, stage), wanted(op, view, maker.made, d, stage))
    if how == "all-reduce" and op.kind in WRITES:
        return "" if op.kind == "store_add" else "reduce"  # into memory; or to the one that stores
    return how


def exchanges(stage: Stage) -> list[Exchange]:
    """Every collective of a stage: one an operand and direction."""
    reads = [(op, view) for op in stage.ops for view in op.views[: len(op.tiles)] if view.of in stage.makers]
    return [
        Exchange(op, view.of, d.level, how)
        for op, view in reads
        for d in stage.mesh
        if (how := exchange(op, view, stage.makers[view.of], d, stage))
    ]


@dataclass(frozen=True, eq=False)
class Nest:
    """A loop over ``axis`` around ops and other loops."""

    axis: str
    body: tuple[TileOp | Nest, ...]


def nest(ops: Sequence[TileOp], loops: Sequence[str], outer: Mapping[str, str]) -> tuple[TileOp | Nest, ...]:
    """The program of one worker: neighbouring ops that mention an axis share its loop, others stand outside.

    What mentions a ragged axis lies inside of the loop over the axis around it too (``Stage.outer``).
    An op that needs a sum over the loop complete starts the loop again: a second pass.
    """
    if not loops:
        return tuple(ops)
    axis = loops[0]
    runs: list[tuple[bool, list[TileOp]]] = []
    summed: set[str] = set()
    for op in ops:
        inside = axis in around(op.mentions, outer)
        if not runs or runs[-1][0] != inside or (inside and not summed.isdisjoint(op.ins)):
            runs.append((inside, []))
            summed = set()
        runs[-1][1].append(op)
        if inside and op.out is not None and axis not in around(op.result_axes, outer):
            summed.add(op.out.name)
    made: list[TileOp | Nest] = []
    for inside, run in runs:
        body = nest(run, loops[1:], outer)
        made += [Nest(axis, body)] if inside else body
    return tuple(made)


def loops_of(stage: Stage) -> tuple[TileOp | Nest, ...]:
    """The nest of a stage."""
    return nest(stage.ops, [loop.axis for loop in stage.loops], stage.outer)


def held(stage: Stage, tile: str) -> tuple[str, ...]:
    """Axes of ``tile`` of which a worker holds its whole part and not one block: it lives on outside their loops."""
    paths = [path for op, path in _paths(loops_of(stage)) if tile in (*op.ins, op.out and op.out.name)]
    shared = [each[0] for each in zip(*paths, strict=False) if all(x is each[0] for x in each)]
    inside = {loop.axis for loop in shared}
    return tuple(a.name for a in stage.defined()[tile].axes if a.name not in inside)


def _paths(body: Sequence[TileOp | Nest], path: tuple[Nest, ...] = ()) -> Iterator[tuple[TileOp, tuple[Nest, ...]]]:
    for item in body:
        if isinstance(item, Nest):
            yield from _paths(item.body, (*path, item))
        else:
            yield item, path
