"""Rows by an index: lookups, whose operand is read at ``x[index[e], f]``, and sums that are added there in memory.

Each one's gradient is the other. A sum by an index is complete when its pipeline is: it leaves, and nothing of the same
pipeline reads it. An index is a tensor in memory; where it has several dimensions it is read as one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from tilestream.graph.nodes import Unsupported, argument, integer, number, packet, value
from tilestream.ir.axes import At, Axis, View
from tilestream.studies.kitsune.lowering.dims import Axes, Shape
from tilestream.studies.kitsune.lowering.shapes import Shapes, sizes
from tilestream.studies.kitsune.lowering.views import alone, first
from tilestream.studies.kitsune.lowering.writer import INDICES, Ref, Writer, dtype_of, own

aten = torch.ops.aten

LOOKUPS = (aten.index_select, aten.gather, aten.embedding, aten.index)
SUMS = (aten.index_add, aten.scatter_add, aten.index_put, aten.embedding_dense_backward)
ZEROS = (aten.zeros, aten.zeros_like, aten.new_zeros, aten.full, aten.new_full, aten.full_like)


@dataclass(frozen=True)
class _Indexed:
    """A table, and rows that are looked up in it or added to it.

    Attributes:
        by: for dimensions of the table, neighbours: the index that says where in it each row is, or each element of one
            (``pointwise``).
        count: dimensions of the indices, which the rows have in place of those of the table.
        table, rows: their sizes.
        given: the operand: what is looked up in, or what is added.
        start: of a sum, what it is added to; None for zeros.
        wraps: whether a negative index counts from the end.
        scale: of what is added.
    """

    by: Mapping[int, fx.Node]
    count: int
    table: tuple[int, ...]
    rows: tuple[int, ...]
    given: fx.Node
    start: fx.Node | None = None
    pointwise: bool = False
    wraps: bool = False
    scale: float = 1.0

    @property
    def kept(self) -> dict[int, int]:
        """Of the table's dimensions that are not indexed: which of the rows' each is."""
        later = 0 if self.pointwise else self.count - len(self.by)
        return {k: k + later * (k > min(self.by)) for k in range(len(self.table)) if k not in self.by}

    @property
    def indexed(self) -> slice:
        """The rows' dimensions that the index has."""
        return slice(0, len(self.rows)) if self.pointwise else slice(min(self.by), min(self.by) + self.count)

    def frame(self, table: Shape, rows: Shape) -> list[Axes]:
        """The table's dimensions, the rows' where they are the same."""
        return [rows[self.kept[k]] if k in self.kept else axes for k, axes in enumerate(table)]


def is_zeros(node: fx.Node) -> bool:
    """Whether a node makes a tensor of zeros."""
    filled = packet(node) in (aten.full, aten.new_full, aten.full_like)
    return packet(node) in ZEROS and bool(not filled or node.args[-1] == 0)


def _indexed(node: fx.Node) -> _Indexed:
    made = _of_table(node) or _of_list(node) or _of_dimension(node)
    for index in made.by.values():
        fake = value(index)
        if fake is None or fake.dtype not in INDICES:
            raise Unsupported("is indexed by booleans")
    if made.pointwise and any(made.table[k] != made.rows[k] for k in made.kept):
        raise Unsupported("an index that leaves out a part of each row")
    return made


def _of_table(node: fx.Node) -> _Indexed | None:
    """``embedding`` and its gradient."""
    if packet(node) not in (aten.embedding, aten.embedding_dense_backward):
        return None
    given, index = first(node), node.args[1]
    assert isinstance(index, fx.Node)
    if packet(node) is aten.embedding:
        return _Indexed({0: index}, len(sizes(index)), sizes(given), sizes(node), given)
    if integer(node, 3, "padding_idx", -1) >= 0 or argument(node, 4, "scale_grad_by_freq", False):
        raise Unsupported("the gradient of a table with a padding row, or scaled by how often a row is used")
    return _Indexed({0: index}, len(sizes(index)), sizes(node), sizes(given), given)


def _of_list(node: fx.Node) -> _Indexed | None:
    """``x[:, i, j]`` and ``x[:, i, j] += values``: indices of one shape, of dimensions that are neighbours."""
    if packet(node) not in (aten.index, aten.index_put):
        return None
    x, listed = first(node), node.args[1]
    assert isinstance(listed, list | tuple)
    by = {k: i for k, i in enumerate(listed) if isinstance(i, fx.Node)}
    shapes, start, whole = {sizes(i) for i in by.values()}, min(by), sizes(x)
    if len(shapes) > 1 or list(by) != list(range(start, start + len(by))):
        raise Unsupported("is indexed by tensors of different shapes, or in dimensions that are apart")
    (shape,) = shapes
    rows = (*whole[:start], *shape, *whole[start + len(by) :])
    if packet(node) is aten.index:
        return _Indexed(by, len(shape), whole, rows, x, wraps=True)
    if argument(node, 3, "accumulate", False) is not True:
        raise Unsupported("writes by an index: of several to one place the last would win")
    added = node.args[2]
    assert isinstance(added, fx.Node)
    return _Indexed(by, len(shape), whole, rows, added, _start(x), wraps=True)


def _of_dimension(node: fx.Node) -> _Indexed:
    """``index_select``, ``gather``, ``index_add`` and ``scatter_add``."""
    kind, x = packet(node), first(node)
    index, pointwise = argument(node, 2, "index"), kind in (aten.gather, aten.scatter_add)
    dim = integer(node, 1, "dim") % max(1, len(sizes(x)))
    assert isinstance(index, fx.Node)
    count = len(sizes(index)) if pointwise else 1
    if kind in (aten.index_select, aten.gather):
        return _Indexed({dim: index}, count, sizes(x), sizes(node), x, pointwise=pointwise)
    added = argument(node, 3, "source" if kind is aten.index_add else "src")
    assert isinstance(added, fx.Node)
    if pointwise and sizes(added) != sizes(index):
        raise Unsupported("an index that leaves out a part of what is added")
    scale = number(node, 4, "alpha", 1.0) if kind is aten.index_add else 1.0
    return _Indexed({dim: index}, count, sizes(x), sizes(added), added, _start(x), pointwise, scale=scale)


def _start(x: fx.Node) -> fx.Node | None:
    return None if is_zeros(x) else x


def _relate(s: Shapes, i: _Indexed, table: Shape, rows: Shape) -> None:
    """The rows' dimensions are the index's, and the table's but the one that is indexed."""
    for k, at in i.kept.items():
        if table[k] and rows[at]:
            s.dims.same([table[k]], [rows[at]])
    for dim, index in i.by.items():
        s.align(index, rows[i.indexed])
        s.rows.append((table[dim],))


def _by(w: Writer, i: _Indexed, dim: int, rows: Shape) -> At:
    """The coordinate along a dimension that is indexed: one into all elements of the index in order."""
    view = w.view(i.by[dim], rows[i.indexed])
    given = w.index(view.of, i.table[dim] if i.wraps else 0)
    strides: dict[str, int] = {}
    offset = 0
    for k, at in enumerate(view.at or ()):
        step = prod(given.shape[k + 1 :])
        offset += step * at.offset
        for axis, stride in zip(at.axes, at.strides or (1,) * len(at.axes), strict=True):
            strides[axis] = strides.get(axis, 0) + step * stride
    plain = all(x == 1 for x in strides.values())
    return At(tuple(strides), offset, view.of, () if plain else tuple(strides.values()))


def _indexed_axis(w: Writer, axes: Axes) -> Axis:
    """The axis of a table's dimension that is indexed."""
    found = alone(w, axes)
    if found is None:
        raise Unsupported("indexes the only row")
    return found


# -- lookups


def lookup_shapes(s: Shapes, node: fx.Node) -> None:
    i = _indexed(node)
    dtype_of(node)
    rows = s.dims.new(sizes(node))
    s.make(node, rows)
    s.over(node, rows)
    _relate(s, i, s.read(i.given), rows)


def lookup(w: Writer, node: fx.Node) -> None:
    i = _indexed(node)
    table, rows = w.shapes[i.given, 0], w.shapes[node, 0]
    new = {At((_indexed_axis(w, table[dim]).name,)): _by(w, i, dim, rows) for dim in i.by}
    view = w.view(i.given, i.frame(table, rows))
    if w.ref(i.given).tile is not None:
        raise Unsupported("looks up rows of what its own pipeline makes")
    if [at for at in view.at or () if any(old.axes[0] in at.axes for old in new)] != list(new):
        raise Unsupported("looks up rows of a part of a tensor")
    tile = w.loaded(View(view.of, tuple(new.get(at, at) for at in view.at or ())), rows, dtype_of(node))
    w.refs[node, 0] = Ref(tile.name, own(tile).at or (), tile)


# -- sums


def sum_shapes(s: Shapes, node: fx.Node) -> None:
    i = _indexed(node)
    dtype_of(node)
    whole, rows = s.dims.new(sizes(node)), s.dims.new(i.rows)
    s.make(node, whole)
    s.over(node, rows)
    s.align(i.given, rows)
    if i.start is not None:
        s.align(i.start, whole)
    _relate(s, i, whole, rows)


def add_up(w: Writer, node: fx.Node) -> None:
    i = _indexed(node)
    whole, rows = w.shapes[node, 0], w.range
    tile = w.tile(i.given, rows)
    if i.scale != 1.0:
        tile = w.binary("mul", tile, i.scale, "f32")
    to: list[At] = []
    for k, axes in enumerate(i.frame(whole, rows)):
        if k in i.by:
            _indexed_axis(w, whole[k])
            to.append(_by(w, i, k, rows))
        else:
            to += [At((a.name,)) for a in w.axes([axes])]
    parts = [(tile, tuple(to))]
    if i.start is not None:
        parts.insert(0, (w.tile(i.start, whole), tuple(At((a.name,)) for a in w.axes(whole))))
    w.sums[node] = tuple(parts)


def zeros_shapes(s: Shapes, node: fx.Node) -> None:
    if not is_zeros(node):
        raise Unsupported("makes a constant")
    s.make(node, s.dims.new(sizes(node)))


def zeros(w: Writer, node: fx.Node) -> None:
    """What a sum starts from is memory's; where anything else reads it, it is an input."""
