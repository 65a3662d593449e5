"""Sums of sorted rows as nodes of a graph, in the place of sums by atomics."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from tilestream.graph.nodes import aten
from tilestream.graph.rewrites.given_bounds import Bounds
from tilestream.graph.rewrites.insert import call, cast, size
from tilestream.graph.rewrites.operators import INDEX, LONG, SEGMENT_REDUCE, SEGMENTS
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.rewrites.unsorted import bounds, inverse, shared_order
from tilestream.graph.signs import wraps
from tilestream.graph.sizes import same_sizes
from tilestream.graph.sums import Part, Sum, constant, first_alike

RECOMPUTED = ("recompute", "ac_graph_id")
"""What activation checkpointing writes at a node."""

COUNTED = "tilestream.counted"
"""In the ``meta`` of a number that was counted, where the graph adds ones in its own type."""

JOINED = 8
"""So many tensors Inductor joins by one kernel, with what made them."""

Layout = tuple[tuple[int, int], ...]
"""For each part of a sum, which rows of the matrix are its: every few ones, and from which."""


def sort_sums(graph: fx.Graph, settings: Settings) -> int:
    """Replace additions of messages to nodes by sums of sorted ones where the graph's time falls; how many were.

    Those that share an index share its sort, in a joint graph those of forward and backward.
    """
    if settings.sums is None:
        return 0
    tables, paying, counts = settings.sums(graph)
    replaced: dict[fx.Node, fx.Node] = {}
    for s in counts:
        Counted(graph, [s], replaced).replace()
    for together in tables:
        Tables(graph, together, replaced).replace()
    for together in paying:
        Sorted(graph, together, replaced).replace()
    return len(counts) + sum(len(s.parts) for together in (*tables, *paying) for s in together)


class Sorted:
    """Sums along the same indices to as many nodes, which share one sort.

    Args:
        graph: changed in place.
        together: in the graph's order.
        replaced: what became of other sums, which may be bases and messages of these; added to.
    """

    def __init__(self, graph: fx.Graph, together: Sequence[Sum], replaced: dict[fx.Node, fx.Node]) -> None:
        self._graph, self._sums, self._replaced, self._like = graph, together, replaced, together[0].node

    def replace(self) -> None:
        """Put the sort before the first sum, and each sum where it was."""
        orders, starts, busy = self._sort()
        for s in self._sums:
            self._like = s.node
            with self._graph.inserting_before(s.node):
                total = self._sum(s, orders[_layout(s.parts)], starts, busy)
                made = self._flat(total, [-1, *s.node.meta["val"].shape[1:]])
            self._becomes(s.node, made)

    def _becomes(self, node: fx.Node, made: fx.Node) -> None:
        node.replace_all_uses_with(made)
        made.meta = dict(node.meta)
        self._replaced[node] = made

    def _sort(self) -> tuple[dict[Layout, fx.Node | None], fx.Node, fx.Node | None]:
        """For each layout the rows of its matrices in sorted order; where those of each node start; and busy nodes, if
        that is not known to be none."""
        before = self._like.prev
        with self._graph.inserting_before(self._like):
            indices = self._indices()
            index = self._joined(indices)
            order, starts, busy = self._segments(index)
            if order is not None and len(indices) == 1 and indices[0] is self._sums[0].parts[0].index:
                order.meta[INDEX] = indices[0].name
            layouts = [_layout(s.parts) for s in self._sums]
            orders = {layout: self._order(layout, order, indices) for layout in layouts}
        while (before := before.next) is not self._like:
            for tag in RECOMPUTED:  # a checkpoint around one sum says nothing of a sort that others use
                before.meta.pop(tag, None)
        return orders, starts, busy

    def _segments(self, index: fx.Node) -> tuple[fx.Node | None, fx.Node, fx.Node | None]:
        nodes = self._nodes()
        known = shared_order(index, nodes)
        if known is not None and known[1] <= LONG and (known[0] is not None or self._is_whole):
            order = None if known[0] is None else inverse(self._like, known[0])
            return order, bounds(self._like, index, nodes, known[1]), None
        made = self._call(SEGMENTS, index, nodes, False, self._wraps(first_alike(self._graph)))
        order, starts, busy = (self._call(getitem, made, k) for k in range(3))
        return order, starts, busy

    def _wraps(self, same: Mapping[fx.Node, fx.Node]) -> bool:
        """Whether everybody counts indices below zero from the end. ``same``: ``first_alike`` of the graph."""
        return all(wraps(p.index, same) for s in self._sums for p in s.parts)

    @property
    def _is_whole(self) -> bool:
        """Whether all messages are whole matrices."""
        return all(len(s.parts) == 1 and _layout(s.parts) == ((1, 0),) for s in self._sums)

    def _joined(self, indices: Sequence[fx.Node]) -> fx.Node:
        """As one, a few at a time."""
        while len(indices) > 1:
            parts = [indices[k : k + JOINED] for k in range(0, len(indices), JOINED)]
            indices = [p[0] if len(p) == 1 else self._call(aten.cat.default, p) for p in parts]
        return indices[0]

    def _indices(self) -> list[fx.Node]:
        return [self._flat(p.index, [-1]) for p in self._sums[0].parts]

    def _nodes(self) -> Any:
        """How many there are: a number, or a node of the graph."""
        to, count = self._sums[0].parts[0].node, self._like.meta["val"].shape[0]
        if isinstance(count, int):
            return count
        if to.target is aten.embedding_dense_backward.default:
            return to.args[2]
        return self._call(aten.sym_size.int, to.args[0], 0)

    def _order(self, layout: Layout, order: fx.Node | None, indices: Sequence[fx.Node]) -> fx.Node | None:
        """Rows of the matrix in sorted order, where ``order`` has places among all edges."""
        if order is None:
            return None
        if len(layout) == 1:
            return self._spread(order, *layout[0])
        named: dict[str, Any] = {"dtype": torch.int32, "device": order.meta["val"].device}
        numbers = []
        for index, (every, first) in zip(indices, layout, strict=True):
            edges = self._call(aten.arange.default, size(self._like, index), **named)
            numbers.append(self._spread(edges, every, first))
        return self._call(aten.index_select.default, self._call(aten.cat.default, numbers), 0, order)

    def _spread(self, numbers: fx.Node, every: int, first: int) -> fx.Node:
        scaled = numbers if every == 1 else self._call(aten.mul.Tensor, numbers, every)
        return scaled if first == 0 else self._call(aten.add.Tensor, scaled, first)

    def _sum(self, s: Sum, order: fx.Node | None, starts: fx.Node, busy: fx.Node | None) -> fx.Node:
        """[nodes, *] where its rows are the matrix, else [nodes, features]."""
        (part, *others) = s.parts
        base, rows = (None if x is None else self._replaced.get(x, x) for x in (s.base, part.matrix))
        if others or not part.whole:
            base, rows = (None if x is None else self._flat(x, [-1, part.features]) for x in (base, rows))
        how = "sum" if s.how == "mean" else s.how
        total = self._call(SEGMENT_REDUCE, base, rows, order, starts, busy, how)
        return self._mean(total, part, starts) if s.how == "mean" else total

    def _mean(self, total: fx.Node, part: Part, starts: fx.Node) -> fx.Node:
        """Of sums, by how many rows each node has; as torch rounds it, sums first."""
        fake, segments = total.meta["val"], Bounds(self._like, starts)
        count = segments.counts()
        if part.counts_base:
            count = self._call(aten.add.Tensor, count, 1)
        count = self._call(aten._to_copy.default, self._call(aten.clamp_min.default, count, 1), dtype=fake.dtype)
        return self._call(aten.div.Tensor, total, segments.wide(count, fake.dim()))

    def _flat(self, x: fx.Node, shape: list[Any]) -> fx.Node:
        """``x`` in a shape whose first size is whatever is left."""
        had = x.meta["val"].shape
        whole = len(had) == len(shape) and same_sizes(had[1:], shape[1:])
        return x if whole else self._call(aten.reshape.default, x, shape)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call(self._like, target, *args, **kwargs)


class Tables(Sorted):
    """Gradients of several tables, whose rows lie in one matrix: one sort, and one sum to the rows of all tables.

    Sums that start with zeros, one part each, to known numbers of rows. They become slices of one tensor.
    """

    def __init__(self, graph: fx.Graph, tables: Sequence[Sum], replaced: dict[fx.Node, fx.Node]) -> None:
        super().__init__(graph, [Sum(tables[0].node, None, tuple(p for t in tables for p in t.parts))], replaced)
        self._heights = [t.node.meta["val"].shape[0] for t in tables]

    def replace(self) -> None:
        """Put sort and sum before the last of the tables' nodes, which all readers must follow."""
        parts = self._sums[0].parts
        nodes = {p.node for p in parts}
        self._like = next(n for n in reversed(self._graph.nodes) if n in nodes)
        orders, starts, busy = self._sort()
        with self._graph.inserting_before(self._like):
            total = self._sum(self._sums[0], orders[_layout(parts)], starts, busy)
            first = 0
            for part, height in zip(parts, self._heights, strict=True):
                rows = self._call(aten.slice.Tensor, total, 0, first, first + height)
                self._becomes(part.node, self._flat(rows, [-1, *part.node.meta["val"].shape[1:]]))
                first += height

    def _indices(self) -> list[fx.Node]:
        found, first = [], 0
        for index, height in zip(super()._indices(), self._heights, strict=True):
            found.append(index if first == 0 else self._call(aten.add.Tensor, index, first))
            first += height
        return found

    def _nodes(self) -> int:
        return sum(self._heights)


class Counted(Sorted):
    """A sum of one number again and again, as a degree of ones: counted by atomics in whole numbers, which no order
    changes, and rounded once. The operator that adds stays what it was, and asks as much of its index."""

    def replace(self) -> None:
        """Put the count where the sum was."""
        (s,), node = self._sums, self._like
        (part,), made = s.parts, node.meta["val"]
        with self._graph.inserting_before(node):
            index = self._flat(part.index, [-1])
            zeros = self._call(aten.new_zeros.default, index, [self._nodes()], dtype=torch.int32)
            ones = self._call(aten.ones_like.default, index, dtype=torch.int32)
            if part.node.target in (aten.index_put.default, aten.embedding_dense_backward.default):
                count = self._call(aten.index_put.default, zeros, [index], ones, True)
            else:
                count = self._call(aten.scatter_add.default, zeros, 0, cast(node, index, torch.int64), ones)
            count.meta[COUNTED] = True
            each = constant(part.rows)
            if each != 1:
                count = self._call(aten.mul.Tensor, cast(node, count, torch.float32), each)
            total = self._flat(self._call(aten._to_copy.default, count, dtype=made.dtype), [-1, *made.shape[1:]])
        self._becomes(node, total)


def _layout(parts: Sequence[Part]) -> Layout:
    return tuple((p.every, p.first) for p in parts)
