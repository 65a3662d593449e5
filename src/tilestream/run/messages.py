"""Messages that are added to nodes beside regions: summed by node in sorted order, where that is faster.

PyTorch adds messages to nodes by atomics, one element at a time: 87 us for 88,000 messages of 128 bf16 features on an
H200, in another order each time. Sorted by node once a graph, the same messages are summed in 7 us, in fp32 and always
in the same order: the same bits in every run, at half of the error. The sort takes 60 us, so it pays for models that
send messages along the same edges again and again.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from operator import getitem
from typing import Any

import sympy
import torch
from torch import Tensor, fx

from tilestream.graph.nodes import is_view
from tilestream.graph.sizes import expression, hint, same_size

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
    if index.is_cuda:
        from tilestream.cuda.segments import keys, starts

        ordered, order = torch.sort(keys(index.contiguous(), nodes), stable=True)
        return order, starts(ordered, nodes)
    ordered, order = torch.sort(torch.where(index < 0, index + nodes, index), stable=True)
    if len(ordered) and not 0 <= int(ordered[0]) <= int(ordered[-1]) < nodes:
        raise RuntimeError(f"an index is outside of {nodes} nodes")
    return order, torch.searchsorted(ordered, torch.arange(nodes + 1), out_int32=True)


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


@dataclass(frozen=True)
class Addition:
    """Rows added to the rows of ``base`` that ``index`` names: what ``node`` computes. ``at``: of the rows among its
    arguments, which change where one addition is another's base."""

    node: fx.Node
    index: fx.Node
    at: int

    @property
    def base(self) -> Any:
        return self.node.args[0]

    @property
    def rows(self) -> Any:
        return self.node.args[self.at]


def sort_messages(graph: fx.GraphModule) -> int:
    """Replace additions of messages to nodes by sums of sorted ones where the graph's time falls; how many were.

    Those that share an index share its sort.

    Args:
        graph: functional ATen with ``val`` in its nodes' meta; changed in place.
    """
    by_index: dict[tuple[fx.Node, sympy.Expr], list[Addition]] = defaultdict(list)
    for node in graph.graph.nodes:
        found = _addition(node)
        if found is not None:
            by_index[found.index, expression(found.base.meta["val"].shape[0])].append(found)
    replaced = 0
    for additions in by_index.values():
        if _gain_us(additions) > 0:
            _replace(graph.graph, additions)
            replaced += len(additions)
    if replaced:
        graph.graph.eliminate_dead_code()
        graph.graph.lint()
        graph.recompile()
    return replaced


def _addition(node: fx.Node) -> Addition | None:
    """What ``index_add``, ``scatter_add`` or ``index_put`` adds, if it is rows of 16-bit floats to rows of a matrix."""
    index: Any = None
    at = 3
    if node.target is aten.index_add.default and node.args[1] in (0, -2) and node.kwargs.get("alpha", 1) == 1:
        index = node.args[2]
    elif node.target is aten.scatter_add.default and node.args[1] in (0, -2):
        index = _repeated(node.args[2]) if _same_shape(node.args[2], node.args[3]) else None
    elif node.target is aten.index_put.default and len(node.args) == 4 and node.args[3] is True:
        names, at = node.args[1], 2
        index = names[0] if isinstance(names, list | tuple) and len(names) == 1 else None
    if not isinstance(index, fx.Node):
        return None
    found = Addition(node, index, at)
    to, names, given = (x.meta["val"] for x in (found.base, index, found.rows))
    if to.dim() != 2 or given.dim() != 2 or names.dim() != 1 or names.dtype not in (torch.int64, torch.int32):
        return None
    features = given.shape[1]
    if given.dtype != to.dtype or to.dtype not in (torch.bfloat16, torch.float16) or not isinstance(features, int):
        return None
    row = features * given.element_size()
    fits = row % ROW_BYTES == 0 and 0 < row <= MOST_ROW_BYTES
    whole = same_size(to.shape[1], features) and same_size(given.shape[0], names.shape[0])
    return found if fits and whole else None


def _same_shape(a: Any, b: Any) -> bool:
    shapes = [x.meta["val"].shape for x in (a, b)]
    return len(shapes[0]) == len(shapes[1]) and all(same_size(m, n) for m, n in zip(*shapes, strict=True))


def _repeated(wide: Any) -> fx.Node | None:
    """The index [edges] of which ``wide`` [edges, features] is a copy a column, as graph libraries expand it."""
    if not isinstance(wide, fx.Node) or wide.target is not aten.expand.default:
        return None
    column: Any = wide.args[0]
    if column.meta["val"].dim() != 2 or not same_size(column.meta["val"].shape[1], 1):
        return None
    while isinstance(column, fx.Node) and column.meta["val"].dim() == 2 and is_view(column):
        column = column.args[0]
    return column if isinstance(column, fx.Node) and column.meta["val"].dim() == 1 else None


def _gain_us(additions: list[Addition]) -> float:
    """What sums in sorted order take less than atomics do, the sort counted once."""
    gain, edges = 0.0, 0
    for found in additions:
        fake = found.rows.meta["val"]
        edges, features = hint(fake.shape[0]), fake.shape[1]
        gain += ATOMIC_US * edges * features - SUM_US - edges * features * fake.element_size() / SUM_BYTES_PER_US
    return gain - SORT_US - edges / SORT_EDGES_PER_US


def _replace(graph: fx.Graph, additions: list[Addition]) -> None:
    to, index = additions[0].base, additions[0].index
    nodes = to.meta["val"].shape[0]
    with graph.inserting_before(additions[0].node):
        count = nodes if isinstance(nodes, int) else graph.call_function(aten.sym_size.int, (to, 0))
        if isinstance(count, fx.Node):
            count.meta["val"] = nodes
        both = graph.call_function(SEGMENTS, (index, count))
        both.meta["val"] = _segments_shape(index.meta["val"], nodes)
        parts = [graph.call_function(getitem, (both, k)) for k in range(2)]
        for part, fake in zip(parts, both.meta["val"], strict=True):
            part.meta["val"] = fake
    for found in additions:
        with graph.inserting_before(found.node):
            base = None if _is_zeros(found.base) else found.base
            made = graph.call_function(SEGMENT_SUM, (base, found.rows, *parts))
        made.meta = dict(found.node.meta)
        found.node.replace_all_uses_with(made)


def _is_zeros(node: fx.Node) -> bool:
    if node.target in (aten.zeros_like.default, aten.zeros.default, aten.new_zeros.default):
        return True
    return node.target in (aten.full.default, aten.full_like.default) and bool(node.args[1] == 0)
