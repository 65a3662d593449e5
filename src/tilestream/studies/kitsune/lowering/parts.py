"""Parts of a tensor at their places: concatenations, and the gradients of slices. Beside a part it is zero."""

from __future__ import annotations

import torch
from torch import fx

from tilestream.graph.nodes import Unsupported, argument, integer, packet
from tilestream.ir.axes import At, Axis, View
from tilestream.studies.kitsune.lowering.dims import Axes, Shape
from tilestream.studies.kitsune.lowering.shapes import Shapes, sizes
from tilestream.studies.kitsune.lowering.views import alone, first
from tilestream.studies.kitsune.lowering.writer import Ref, Writer, dtype_of, own

aten = torch.ops.aten


def _relate(s: Shapes, part: object, shape: Shape, dim: int, new: bool) -> None:
    """A part has the dimensions of the whole but ``dim``, which it lacks if that one is ``new``."""
    mine = list(s.read(part))
    if new:
        mine.insert(dim, ())
    for i, (its, axes) in enumerate(zip(mine, shape, strict=True)):
        if i != dim and its:
            s.dims.same([its], [axes])


def _shifted(w: Writer, part: fx.Node, shape: Shape, dim: int, new: bool, start: int, number: int) -> tuple[View, int]:
    """``part`` read where the whole has it, ``start`` on along ``dim``; and how long it is there."""
    its: Axes = () if new else w.shapes[part, 0][dim]
    before, after = shape[:dim], shape[dim + 1 :]
    tile = w.tile(part, (*before, *after) if new else (*before, its, *after))
    inner = alone(w, its)
    if inner is None:  # of one element: it needs an axis, or it would be everywhere
        inner = Axis(f"{w.node.name}.{number}", 1)
        tile = w.widened(tile, inner)
    along = alone(w, shape[dim])
    to = {inner.name: At((along.name,), -start) if along is not None else At()}
    return View(tile.name, tuple(to.get(a.name, At((a.name,))) for a in tile.axes)), inner.size or 1


# -- concatenations


def _joined(node: fx.Node) -> tuple[list[object], int, bool]:
    """Parts, the dimension along which they lie, and whether that one is new."""
    parts = node.args[0]
    if not isinstance(parts, list | tuple):
        raise Unsupported("its operands are not a list")
    dim = argument(node, 1, "dim", 0)
    assert isinstance(dim, int)
    return list(parts), dim % len(sizes(node)), packet(node) is aten.stack


def cat_shapes(s: Shapes, node: fx.Node) -> None:
    parts, dim, new = _joined(node)
    shape = s.dims.new(sizes(node))
    s.make(node, shape)
    s.over(node, shape)
    for part in parts:
        _relate(s, part, shape, dim, new)


def cat(w: Writer, node: fx.Node) -> None:
    """The sum of all parts, each shifted to its place."""
    parts, dim, new = _joined(node)
    shape = w.shapes[node, 0]
    views: list[View] = []
    start = 0
    for number, part in enumerate(parts):
        assert isinstance(part, fx.Node)
        view, length = _shifted(w, part, shape, dim, new, start, number)
        views.append(view)
        start += length
    tile = w.parts(views, shape, dtype_of(node))
    w.refs[node, 0] = Ref(tile.name, own(tile).at or (), tile)


# -- gradients of slices


def _place(node: fx.Node) -> tuple[fx.Node, int, int, bool]:
    """The part, its dimension, where it starts, and whether the part lacks that dimension."""
    size, dim, start = sizes(node), integer(node, 2, "dim"), integer(node, 3, "start")
    dim %= len(size)
    if packet(node) is aten.select_backward:
        return first(node), dim, start % size[dim], True
    start, _, step = slice(start, None, integer(node, 5, "step")).indices(size[dim])
    if step != 1:
        raise Unsupported("the gradient of a slice with a step")
    return first(node), dim, start, False


def placed_shapes(s: Shapes, node: fx.Node) -> None:
    part, dim, _, new = _place(node)
    shape = s.dims.new(sizes(node))
    s.make(node, shape)
    s.over(node, shape)
    _relate(s, part, shape, dim, new)


def placed(w: Writer, node: fx.Node) -> None:
    part, dim, start, new = _place(node)
    view, _ = _shifted(w, part, w.shapes[node, 0], dim, new, start, 0)
    made = w.copied(view, w.shapes[node, 0], dtype_of(node))
    w.refs[node, 0] = Ref(made.name, own(made).at or (), made)
