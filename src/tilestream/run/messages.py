"""Messages that are added to nodes beside regions: summed by node in sorted order, where that is faster.

PyTorch adds messages to nodes by atomics, one element at a time: 87 us for 88,000 messages of 128 bf16 features on an
H200, in another order each time. Sorted by node once a graph, the same messages are summed in 7 us, in fp32 and always
in the same order: the same bits in every run, at half of the error. The sort takes 60 us, so it pays for models that
send messages along the same edges again and again.

A training step sorts before its graph is cut into forward and backward: what both sum along is sorted once. The
gradient of rows that were gathered twice, by sender and by receiver, is one sum over both ends of all edges.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from operator import getitem
from typing import Any

import torch
from torch import fx

from tilestream.graph.insert import call
from tilestream.graph.nodes import aten
from tilestream.graph.sizes import expression, hint, same_size
from tilestream.graph.sums import Part, Sum, first_alike, sums
from tilestream.run.segments import SEGMENT_SUM, SEGMENTS

ROW_BYTES = 16
"""Rows are read by lanes of so many bytes."""

MOST_ROW_BYTES = 8192
"""Of a row: 512 lanes."""

ATOMIC_US = 8e-6
"""Microseconds an element that ``index_add`` takes (16 bits; 7.7e-6 to 9.1e-6 on an H200)."""

SUM_US, SUM_BYTES_PER_US = 3.0, 3e6
SORT_US, SORT_EDGES_PER_US = 55.0, 1.5e4
"""Of sums over sorted messages, and of sorting them: a fixed part and a rate."""

RECOMPUTED = ("recompute", "ac_graph_id")
"""What activation checkpointing writes at a node."""

Layout = tuple[tuple[int, int], ...]
"""For each part of a sum, which rows of the matrix are its: every few ones, and from which."""


def sort_messages(graph: fx.GraphModule) -> int:
    """Replace additions of messages to nodes by sums of sorted ones where the graph's time falls; how many were.

    Those that share an index share its sort, in a joint graph those of forward and backward.

    Args:
        graph: functional ATen with ``val`` in its nodes' meta; changed in place.
    """
    found = [s for s in sums(graph.graph) if _row_bytes(s) <= MOST_ROW_BYTES]
    if not found:
        return 0
    same = first_alike(graph.graph)
    several, paying = _paying([s for s in found if len(s.parts) > 1], same)
    alone = [s for s in found if len(s.parts) == 1] + [one for s in several for one in s.separate]
    places = {node: place for place, node in enumerate(graph.graph.nodes)}
    paying += _paying(sorted(alone, key=lambda s: places[s.node]), same)[1]
    replaced: dict[fx.Node, fx.Node] = {}
    for together in paying:
        _Sorted(graph.graph, together, replaced).replace()
    if paying:
        graph.graph.eliminate_dead_code()
        graph.graph.lint()
        graph.recompile()
    return sum(len(s.parts) for together in paying for s in together)


def _paying(found: Sequence[Sum], same: dict[fx.Node, fx.Node]) -> tuple[list[Sum], list[list[Sum]]]:
    """Sums whose sort does not pay; and the others, together where they share one."""
    by_sort: dict[tuple[Any, ...], list[Sum]] = defaultdict(list)
    for s in found:
        indices = tuple(same.get(p.index, p.index) for p in s.parts)
        by_sort[indices, expression(s.node.meta["val"].shape[0])].append(s)
    paying = [together for together in by_sort.values() if _pays(together)]
    return [s for together in by_sort.values() if together not in paying for s in together], paying


def _pays(together: Sequence[Sum]) -> bool:
    """Whether sums in sorted order take less than atomics do, the sort counted once.

    torch's own deterministic sums sort for each of them. There are no times of fp32 atomics.
    """
    if torch.are_deterministic_algorithms_enabled():
        return True
    size = together[0].node.meta["val"].element_size()
    gain = -SORT_US - sum(map(_edges, together[0].parts)) / SORT_EDGES_PER_US
    for s in together:
        elements = sum(_edges(p) * p.features for p in s.parts)
        passes = 3 if _padding(s) else 1
        gain += ATOMIC_US * elements - SUM_US - passes * elements * size / SUM_BYTES_PER_US
    return size == 2 and gain > 0


def _edges(part: Part) -> int:
    edges = 1
    for size in part.index.meta["val"].shape:
        edges *= hint(size)
    return edges


def _row_bytes(s: Sum) -> int:
    return s.parts[0].features * s.node.meta["val"].element_size()


def _padding(s: Sum) -> int:
    """Features that a row lacks to be read by whole lanes."""
    return -_row_bytes(s) % ROW_BYTES // s.node.meta["val"].element_size()


def _layout(s: Sum) -> Layout:
    return tuple((p.every, p.first) for p in s.parts)


class _Sorted:
    """Sums along the same indices to as many nodes, as nodes of a graph that share one sort.

    Args:
        replaced: what became of other sums, which may be bases and messages of these; added to.
    """

    def __init__(self, graph: fx.Graph, together: Sequence[Sum], replaced: dict[fx.Node, fx.Node]) -> None:
        self._graph, self._sums, self._replaced, self._like = graph, together, replaced, together[0].node

    def replace(self) -> None:
        rows, starts = self._sort()
        for s in self._sums:
            self._like = s.node
            with self._graph.inserting_before(s.node):
                made = self._sum(s, rows[_layout(s)], starts)
            s.node.replace_all_uses_with(made)
            made.meta = dict(s.node.meta)
            self._replaced[s.node] = made

    def _sort(self) -> tuple[dict[Layout, fx.Node], fx.Node]:
        """For each layout the rows of its matrices in sorted order; and where those of each node start."""
        with self._graph.inserting_before(self._like):
            before = self._like.prev
            indices = [self._flat(p.index, [-1]) for p in self._sums[0].parts]
            index = indices[0] if len(indices) == 1 else self._call(aten.cat.default, indices)
            both = self._call(SEGMENTS, index, self._nodes())
            order, starts = (self._call(getitem, both, k) for k in range(2))
            rows = {layout: self._rows(layout, order, indices) for layout in map(_layout, self._sums)}
        while (before := before.next) is not self._like:
            for tag in RECOMPUTED:  # a checkpoint around one sum says nothing of a sort that others use
                before.meta.pop(tag, None)
        return rows, starts

    def _nodes(self) -> Any:
        """How many there are: a number, or a node of the graph."""
        to, count = self._sums[0].parts[0].node, self._like.meta["val"].shape[0]
        if isinstance(count, int):
            return count
        if to.target is aten.embedding_dense_backward.default:
            return to.args[2]
        return self._call(aten.sym_size.int, to.args[0], 0)

    def _rows(self, layout: Layout, order: fx.Node, indices: Sequence[fx.Node]) -> fx.Node:
        """Rows of the matrix in sorted order, where ``order`` has places among all edges."""
        if len(layout) == 1:
            return self._spread(order, *layout[0])
        named: dict[str, Any] = {"dtype": torch.int64, "device": order.meta["val"].device}
        numbers = []
        for index, (every, first) in zip(indices, layout, strict=True):
            edges: Any = index.meta["val"].shape[0]
            edges = edges if isinstance(edges, int) else self._call(aten.sym_size.int, index, 0)
            numbers.append(self._spread(self._call(aten.arange.default, edges, **named), every, first))
        return self._call(aten.index_select.default, self._call(aten.cat.default, numbers), 0, order)

    def _spread(self, numbers: fx.Node, every: int, first: int) -> fx.Node:
        scaled = numbers if every == 1 else self._call(aten.mul.Tensor, numbers, every)
        return scaled if first == 0 else self._call(aten.add.Tensor, scaled, first)

    def _sum(self, s: Sum, order: fx.Node, starts: fx.Node) -> fx.Node:
        features, padding, made = s.parts[0].features, _padding(s), s.node.meta["val"]
        given = [None if x is None else self._replaced.get(x, x) for x in (s.base, s.parts[0].matrix)]
        operands = [None if x is None else self._flat(x, [-1, features]) for x in given]
        if padding:
            pad = aten.constant_pad_nd.default
            operands = [None if x is None else self._call(pad, x, [0, padding]) for x in operands]
        total = self._call(SEGMENT_SUM, *operands, order, starts)
        if padding:
            total = self._call(aten.slice.Tensor, total, 1, 0, features)
        return self._flat(total, [-1, *made.shape[1:]])

    def _flat(self, x: fx.Node, shape: list[Any]) -> fx.Node:
        """``x`` in a shape whose first size is whatever is left."""
        had = x.meta["val"].shape
        whole = len(had) == len(shape) and all(same_size(a, b) for a, b in zip(had[1:], shape[1:], strict=True))
        return x if whole else self._call(aten.reshape.default, x, shape)

    def _call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return call(self._graph, target, args, self._like, kwargs)
