"""``index_add`` of messages beside regions: summed by node in sorted order, where that is faster.

PyTorch adds messages to nodes by atomics, one element at a time: 87 us for 88,000 messages of 128 bf16 features on an
H200, in another order each time. Sorted by node once a graph, the same messages are summed in 7 us, in fp32 and always
in the same order: the same bits in every run, at half of the error. The sort takes 60 us, so it pays for models that
send messages along the same edges again and again.
"""

from __future__ import annotations

from collections import defaultdict
from operator import getitem
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from tilestream.graph.sizes import expression, hint

aten = torch.ops.aten

ROW_BYTES = 16
"""Rows are read by lanes of so many bytes."""

MOST_ROW_BYTES = 8192
"""Of a row: 512 lanes."""

ATOMIC_US = 8e-6
"""Microseconds an element that ``index_add`` takes (16 bits; 7.7e-6 to 9.1e-6 on an H200)."""

SUM_US, SUM_BYTES_PER_US = 3.0, 3e6
SORT_US, SORT_EDGES_PER_US = 55.0, 1.5e4
"""Of sums over sorted messages, and of sorting them: a fixed part and a rate."""

_library = torch.library.Library("tilestream", "FRAGMENT")
for _schema in (
    "segments(Tensor index, SymInt nodes) -> (Tensor, Tensor)",
    "segment_sum(Tensor? base, Tensor rows, Tensor order, Tensor starts) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.needs_exact_strides,))

SEGMENTS = torch.ops.tilestream.segments.default
SEGMENT_SUM = torch.ops.tilestream.segment_sum.default


def segments(index: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """``index`` (integers [edges]) sorted, equal ones in their order: their places, int64 [edges], and where those of
    each node start, int32 [nodes + 1].

    Raises:
        RuntimeError: an index is no node; on a GPU the kernel ends instead, as torch's own assertion does.
    """
    keys = index.clamp(-1, nodes).to(torch.int32)  # what is outside stays outside
    ordered, order = torch.sort(keys, stable=True)
    if index.is_cuda:
        from tilestream.cuda.segments import starts

        return order, starts(ordered, nodes)
    if len(ordered) and not 0 <= int(ordered[0]) <= int(ordered[-1]) < nodes:
        raise RuntimeError(f"an index is outside of {nodes} nodes")
    return order, torch.searchsorted(ordered, torch.arange(nodes + 1, dtype=torch.int32), out_int32=True)


def segment_sum(base: Tensor | None, rows: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    """``base`` (or zeros) plus the rows of each segment, added in fp32 in the order of ``order``: [nodes, *]."""
    if rows.is_cuda:
        from tilestream.cuda.segments import sums

        return sums(None if base is None else base.contiguous(), rows.contiguous(), order, starts)
    nodes = torch.arange(len(starts) - 1).repeat_interleave(starts.diff())
    total = torch.zeros(len(starts) - 1, rows.shape[1]).index_add(0, nodes, rows[order].float())
    return (total if base is None else total + base).to(rows.dtype)


def _segments_shape(index: Tensor, nodes: Any) -> tuple[Tensor, Tensor]:
    return index.new_empty(index.shape, dtype=torch.int64), index.new_empty((nodes + 1,), dtype=torch.int32)


def _sum_shape(base: Tensor | None, rows: Tensor, order: Tensor, starts: Tensor) -> Tensor:
    return rows.new_empty((starts.shape[0] - 1, rows.shape[1]))


_library.impl("segments", segments, "CompositeExplicitAutograd")
_library.impl("segment_sum", segment_sum, "CompositeExplicitAutograd")
torch.library.register_fake("tilestream::segments", _segments_shape, lib=_library)
torch.library.register_fake("tilestream::segment_sum", _sum_shape, lib=_library)


def sort_messages(graph: fx.GraphModule) -> int:
    """Replace every ``index_add`` of messages by sums of sorted ones where the graph's time falls; how many were.

    Those that share an index share its sort.

    Args:
        graph: functional ATen with ``val`` in its nodes' meta; changed in place.
    """
    by_index: dict[tuple[fx.Node, sympy.Expr], list[fx.Node]] = defaultdict(list)
    for node in graph.graph.find_nodes(op="call_function", target=aten.index_add.default):
        if _is_sum_of_messages(node):
            by_index[node.args[2], expression(node.args[0].meta["val"].shape[0])].append(node)
    replaced = 0
    for (index, _), adds in by_index.items():
        if _gain_us(adds) > 0:
            _replace(graph.graph, index, adds)
            replaced += len(adds)
    if replaced:
        graph.graph.eliminate_dead_code()
        graph.graph.lint()
        graph.recompile()
    return replaced


def _is_sum_of_messages(node: fx.Node) -> bool:
    """Whether it adds rows of 16-bit floats to the rows of a matrix, unscaled."""
    if (
        len(node.args) != 4
        or node.kwargs.get("alpha", 1) != 1
        or not all(isinstance(node.args[k], fx.Node) for k in (0, 2, 3))
    ):
        return False
    base, dim, index, rows = node.args
    to, names, given = (x.meta["val"] for x in (base, index, rows))  # pyright: ignore
    if to.dim() != 2 or given.dim() != 2 or names.dim() != 1 or dim not in (0, -2) or given.dtype != to.dtype:
        return False
    features = given.shape[1]
    if given.dtype not in (torch.bfloat16, torch.float16) or not isinstance(features, int):
        return False
    row = features * given.element_size()
    return row % ROW_BYTES == 0 and 0 < row <= MOST_ROW_BYTES


def _gain_us(adds: list[fx.Node]) -> float:
    """What sums in sorted order take less than atomics do, the sort counted once."""
    gain, edges = 0.0, 0
    for node in adds:
        rows: Any = node.args[3]
        edges, features = hint(rows.meta["val"].shape[0]), rows.meta["val"].shape[1]
        size = edges * features
        gain += ATOMIC_US * size - SUM_US - size * rows.meta["val"].element_size() / SUM_BYTES_PER_US
    return gain - SORT_US - edges / SORT_EDGES_PER_US


def _replace(graph: fx.Graph, index: fx.Node, adds: list[fx.Node]) -> None:
    to: Any = adds[0].args[0]
    nodes = to.meta["val"].shape[0]
    with graph.inserting_before(adds[0]):
        count = nodes if isinstance(nodes, int) else graph.call_function(aten.sym_size.int, (to, 0))
        if not isinstance(nodes, int):
            count.meta["val"] = nodes
        both = graph.call_function(SEGMENTS, (index, count))
        both.meta["val"] = _segments_shape(index.meta["val"], nodes)
        parts = [graph.call_function(getitem, (both, k)) for k in range(2)]
        for part, fake in zip(parts, both.meta["val"], strict=True):
            part.meta["val"] = fake
    for node in adds:
        with graph.inserting_before(node):
            base: Any = node.args[0]
            made = graph.call_function(SEGMENT_SUM, (None if _is_zeros(base) else base, node.args[3], *parts))
        made.meta = dict(node.meta)
        node.replace_all_uses_with(made)


def _is_zeros(node: fx.Node) -> bool:
    if node.target in (aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default):
        return True
    return node.target in (aten.full.default, aten.full_like.default) and node.args[1] == 0
