"""Operators of a graph, in groups, as one program over axes: what pipelines of any axes are made of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import fx

from tilestream.graph.nodes import Unsupported
from tilestream.graph.provenance import source
from tilestream.ir.axes import At, Axis, View
from tilestream.ir.pipeline import Role, Tensor, Tile, TileOp
from tilestream.studies.kitsune.lowering import lowering
from tilestream.studies.kitsune.lowering.shapes import Shapes
from tilestream.studies.kitsune.lowering.writer import Given, Ref, Result, Writer, dtype_of, own

T = TypeVar("T")


@dataclass(frozen=True)
class Stored:
    """A result of the program: it goes to ``tensor``, whose elements in row-major order are those of ``result``.

    ``view`` says how the tile is read; ``group`` makes it. Where ``adds`` has tiles and coordinates, it is their sum in
    memory, by an index.
    """

    result: Result
    tensor: Tensor
    tile: Tile
    view: View
    group: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    adds: tuple[tuple[Tile, tuple[At, ...]], ...] = ()

    @property
    def ops(self) -> tuple[TileOp, ...]:
        """What writes it."""
        where = source(self.result[0])
        adds = ((own(tile), View(self.tensor.name, to)) for tile, to in self.adds)
        return tuple(TileOp("store_add", None, (v,), (to,), source=where) for v, to in adds) or (self.op,)

    @property
    def op(self) -> TileOp:
        """What stores it, where it is no sum in memory."""
        to = View(self.tensor.name, tuple(At((a.name,)) for a in self.tensor.axes))
        return TileOp("store", None, (self.view,), (to,), source=source(self.result[0]))


@dataclass(frozen=True)
class Program:
    """Ops by group, in order; what they are given, what leaves; the axes that every group streams along."""

    ops: Mapping[str, tuple[TileOp, ...]]
    given: tuple[Given, ...]
    stored: tuple[Stored, ...]
    streams: tuple[Axis, ...]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        return (*(g.tensor for g in self.given), *(s.tensor for s in self.stored))


def program(
    groups: Mapping[str, Sequence[fx.Node]], leaving: Collection[Result], whole: Collection[fx.Node] = ()
) -> Program:
    """The nodes of ``groups`` as tile ops. Nodes of one group lie in the graph's order, views among them.

    A result that leaves and is read inside as well is rounded first: what a forward graph saves for the backward one
    is what it went on with.

    Args:
        leaving: results that are needed outside.
        whole: nodes outside whose values are whole operands: parameters.

    Raises:
        Unsupported: with the node that has no lowering to axes.
    """
    group_of = {node: name for name, nodes in groups.items() for node in nodes}
    order = {node: i for i, node in enumerate(next(iter(group_of)).graph.nodes)}
    nodes = sorted(group_of, key=order.__getitem__)
    s = Shapes()
    for node in nodes:
        _blamed(node, lambda node=node: lowering(node).shapes(s, node))
    s.settle()
    streams = _streams(s, nodes)
    names = _names(s, streams)
    w = Writer(s.dims, s.of, s.frames, names, frozenset(whole), ops={name: [] for name in groups})
    for node in nodes:
        w.start(node, group_of[node])
        _blamed(node, lambda node=node: lowering(node).write(w, node))
        if any(user in group_of for user in node.users):
            for result in (r for r in leaving if r[0] is node):
                w.settle(result)
    stored = tuple(_stored(w, result, group_of[result[0]]) for result in leaving)
    ops = {name: tuple(ops) for name, ops in w.ops.items()}
    return Program(ops, tuple(w.given.values()), stored, tuple(names[a] for a in streams))


def _blamed(node: fx.Node, act: Callable[[], T]) -> T:
    try:
        return act()
    except Unsupported as why:
        raise Unsupported(why.reason, why.node or node) from why


def _streams(s: Shapes, nodes: Sequence[fx.Node]) -> tuple[int, ...]:
    """Axes that all operators range over and none has innermost: what a pipeline streams along, outermost first."""
    computing = [n for n in nodes if n in s.frames]
    frames = [s.dims.axes(s.frames[n]) for n in computing]
    if not frames:
        return ()
    common = [a for a in frames[0] if all(a in f for f in frames)]
    features = {a for n in computing for a in s.dims.axes([s.features[n]])}
    return tuple(a for a in common if a not in features) or tuple(common[:1])


def _names(s: Shapes, streams: Sequence[int]) -> dict[int, Axis]:
    """``rows`` for what streams, ``c0``, ``c1`` for others."""
    found = dict.fromkeys(a for shape in (*s.of.values(), *s.frames.values()) for a in s.dims.axes(shape))
    names: dict[int, Axis] = {}
    for axis in found:
        if axis in streams:
            at = streams.index(axis)
            name = "rows" if at == len(streams) - 1 else f"batch{at or ''}"
        else:
            name = f"c{len(names)}"
        names[axis] = Axis(name, s.dims.size(axis))
    return names


def _stored(w: Writer, result: Result, group: str) -> Stored:
    node, index = result
    axes = w.axes(w.shapes[result])
    fake = node.meta["val"]
    fake = fake[index] if isinstance(fake, list | tuple) else fake
    tensor = Tensor(f"{node.name}.{index}.out", Role.OUTPUT, axes, dtype_of(node, index))
    if node in w.sums:
        tile = w.sums[node][-1][0]
        return Stored(result, tensor, tile, own(tile), group, tuple(fake.shape), fake.dtype, w.sums[node])
    if result not in w.refs:
        raise Unsupported("a result that its operator does not make", node)
    ref: Ref = w.refs[result]
    if ref.tile is None:
        raise Unsupported("a result that is only a view of an input", node)
    return Stored(result, tensor, ref.tile, View(ref.of, ref.at), group, tuple(fake.shape), fake.dtype)
