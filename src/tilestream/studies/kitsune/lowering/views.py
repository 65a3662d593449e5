"""Views: other coordinates of the same elements."""

from __future__ import annotations

import operator
from dataclasses import replace

import torch
from torch import fx

from tilestream.graph.nodes import Unsupported, argument, integer, packet
from tilestream.ir.axes import At, Axis
from tilestream.studies.kitsune.lowering.dims import Axes
from tilestream.studies.kitsune.lowering.shapes import Shapes, sizes
from tilestream.studies.kitsune.lowering.writer import Ref, Writer, dtype_of, own

aten = torch.ops.aten

RESHAPES = (aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.flatten, aten.unflatten)
COPIES = (aten.clone, aten.contiguous, aten.detach, aten.alias, aten._to_copy)
PERMUTATIONS = (aten.t, aten.transpose, aten.permute)
CUTS = (aten.slice, aten.select)
SPLITS = (aten.split, aten.split_with_sizes, aten.chunk, aten.unbind)


def is_view(node: fx.Node) -> bool:
    """Whether ``node`` is only other coordinates of one operand, and moves and rounds nothing."""
    kind = packet(node)
    if node.target is operator.getitem:
        return packet(node.all_input_nodes[0]) in SPLITS
    if kind in COPIES:
        return first(node).meta["val"].dtype == node.meta["val"].dtype
    return kind in (*RESHAPES, *PERMUTATIONS, *SPLITS, *CUTS, aten.expand)


def first(node: fx.Node) -> fx.Node:
    x = node.args[0]
    if not isinstance(x, fx.Node):
        raise Unsupported("an operand is not a tensor")
    return x


# -- the same elements


def reshape_shapes(s: Shapes, node: fx.Node) -> None:
    shape = s.dims.new(sizes(node))
    s.make(node, shape)
    s.dims.same(s.read(first(node)), shape)


def reshape(w: Writer, node: fx.Node) -> None:
    """The elements in the same order, which other dimensions divide."""
    x = first(node)
    before, after = w.axes(w.shapes[x, 0]), w.axes(w.shapes[node, 0])
    if [a.size for a in before] != [a.size for a in after]:
        raise Unsupported("a view whose dimensions are divided differently")
    to = {a.name: b.name for a, b in zip(before, after, strict=True)}
    ref = w.ref(x)
    w.refs[node, 0] = replace(ref, at=tuple(replace(c, axes=tuple(to[a] for a in c.axes)) for c in ref.at))


def permute_shapes(s: Shapes, node: fx.Node) -> None:
    before = s.read(first(node))
    order = list(range(len(before)))
    if packet(node) is aten.permute:
        dims = argument(node, 1, "dims")
        assert isinstance(dims, list | tuple)
        order = [int(d) % len(before) for d in dims]
    elif len(before) > 1:
        a, b = (0, 1) if packet(node) is aten.t else (integer(node, i, f"dim{i - 1}") % len(before) for i in (1, 2))
        order[a], order[b] = order[b], order[a]
    s.make(node, tuple(before[d] for d in order))


def same(w: Writer, node: fx.Node) -> None:
    """A view whose dimensions are its operand's, by the same axes."""
    w.refs[node, 0] = w.ref(first(node))


def copy_shapes(s: Shapes, node: fx.Node) -> None:
    s.make(node, s.read(first(node)))


def copy(w: Writer, node: fx.Node) -> None:
    """A conversion of layout is a view; one of dtype rounds."""
    x, dtype = first(node), dtype_of(node)
    if dtype_of(x) == dtype:
        return same(w, node)
    tile = w.unary("cast", w.tile(x, w.shapes[node, 0]), dtype)
    w.refs[node, 0] = Ref(tile.name, own(tile).at or (), tile)
    return None


def expand_shapes(s: Shapes, node: fx.Node) -> None:
    shape = s.dims.new(sizes(node))
    s.make(node, shape)
    s.align(first(node), shape)


def expand(w: Writer, node: fx.Node) -> None:
    x = first(node)
    w.refs[node, 0] = replace(w.ref(x), at=w.view(x, w.shapes[node, 0]).at or ())


# -- a part of the elements


def _cut(node: fx.Node) -> tuple[fx.Node, int, int, int, bool]:
    """Of a slice, a select, or a part of a split: what is cut, its dimension, start, step, whether that one goes."""
    if node.target is operator.getitem:
        split, index = first(node), int(node.args[1])  # pyright: ignore[reportArgumentType]
        x = first(split)
        dim = integer(split, 1 if packet(split) is aten.unbind else 2, "dim", 0) % len(sizes(x))
        if packet(split) is aten.unbind:
            return x, dim, index, 1, True
        parts = [sizes(split, i)[dim] for i in range(index)]
        return x, dim, sum(parts), 1, False
    x = first(node)
    dim = integer(node, 1, "dim", 0) % len(sizes(x))
    if packet(node) is aten.select:
        return x, dim, integer(node, 2, "index") % sizes(x)[dim], 1, True
    start = integer(node, 2, "start", 0) if argument(node, 2, "start") is not None else 0
    begin, _, step = slice(start, None, integer(node, 4, "step", 1)).indices(sizes(x)[dim])
    return x, dim, begin, step, False


def cut_shapes(s: Shapes, node: fx.Node) -> None:
    x, dim, _, _, gone = _cut(node)
    before = list(s.read(x))
    if gone:
        del before[dim]
    elif sizes(node)[dim] != sizes(x)[dim]:
        before[dim] = s.dims.new((sizes(node)[dim],))[0]
    s.make(node, tuple(before))


def cut(w: Writer, node: fx.Node) -> None:
    """Other coordinates along one dimension: ``step`` times its new axis, plus ``start``."""
    x, dim, start, step, gone = _cut(node)
    ref, old = w.ref(x), alone(w, w.shapes[x, 0][dim])
    new = None if gone else alone(w, w.shapes[node, 0][dim])
    if old is None or new == old:
        w.refs[node, 0] = ref
        return
    w.refs[node, 0] = replace(ref, at=tuple(moved(c, old.name, new and new.name, step, start) for c in ref.at))


def alone(w: Writer, axes: Axes) -> Axis | None:
    """The one axis of a dimension; none where it has size 1."""
    found = w.axes([axes])
    if len(found) > 1:
        raise Unsupported("cuts a dimension that a view divides")
    return found[0] if found else None


def moved(c: At, old: str, new: str | None, step: int, start: int) -> At:
    """A coordinate along ``old``, where ``old`` is ``step * new + start``; a number where ``new`` is none."""
    if old not in c.axes:
        return c
    strides = c.strides or (1,) * len(c.axes)
    stride = strides[c.axes.index(old)]
    pairs = [(new if a == old else a, x * (step if a == old else 1)) for a, x in zip(c.axes, strides, strict=True)]
    kept = [(a, x) for a, x in pairs if a is not None]
    plain = all(x == 1 for _, x in kept)
    return At(tuple(a for a, _ in kept), c.offset + stride * start, c.index, () if plain else tuple(x for _, x in kept))
