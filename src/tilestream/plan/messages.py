"""Messages that are added to nodes: which of the sums are made in sorted order, and by what kernels."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import fx

from tilestream.graph.nodes import aten, packet
from tilestream.graph.nodes import name as target_name
from tilestream.graph.provenance import source
from tilestream.graph.rewrites.operators import SEGMENT_REDUCE, SEGMENTS, SORTED_INDEX
from tilestream.graph.rewrites.settings import SortedSums
from tilestream.graph.sizes import expression, hint
from tilestream.graph.sums import Part, Sum, constant, first_alike, sums
from tilestream.kernels.coefficients import sums_by_index
from tilestream.plan import margins
from tilestream.plan.indexed import by_atomics, is_table_gradient
from tilestream.plan.values import Moved
from tilestream.simulator.library import Kernel, Own, Stream

TARGETS = (SEGMENTS, SORTED_INDEX, SEGMENT_REDUCE)
"""Operators of ours that lists of edges are sorted by, and that reduce by them."""

MOST_ROW_BYTES = 8192
"""Of a row: 512 lanes."""

MOST_ROWS = 2**31
"""Numbers of rows are int32, in sorted order."""


def sums_of_training(graph: fx.Graph) -> SortedSums:
    """``sorted_sums`` of a joint graph."""
    return sorted_sums(graph, margins.SORTS)


def sorted_sums(graph: fx.Graph, least: float = 1.0) -> SortedSums:
    """The sums of messages of a functional graph that are made in sorted order, since its time falls.

    Args:
        graph: ATen with ``val`` in its nodes' meta.
        least: what they gain, over what their sort takes.
    """
    found = [s for s in sums(graph) if _row_bytes(s) <= MOST_ROW_BYTES and _rows(s) < MOST_ROWS]
    if not found:
        return SortedSums([], [], [])
    same = first_alike(graph)
    places = {node: place for place, node in enumerate(graph.nodes)}
    tables = [together for together in _tables(found, places) if _pays(together, [together])]
    taken = {s.node for together in tables for s in together}
    several, paying = _paying([s for s in found if len(s.parts) > 1], same, least)
    alone = [s for s in found if len(s.parts) == 1 and s.node not in taken]
    alone += [one for s in several for one in s.separate]
    left, more = _paying(sorted(alone, key=lambda s: places[s.node]), same, least)
    paying += more
    inexact = [s for s in left if _stops(s) and (tables or paying or s.parts[0].features == 1)]
    counts = [s for s in inexact if _is_count(s)]
    return SortedSums(tables, [*paying, *_by_sort([s for s in inexact if s not in counts], same)], counts)


def _is_count(s: Sum) -> bool:
    """Whether a sum adds one number to zeros again and again."""
    part = s.parts[0]
    return s.how == "sum" and s.base is None and part.features == 1 and constant(part.rows) is not None


def _stops(s: Sum) -> bool:
    """Whether a sum by atomics may stop growing, 16 bits each time: of ones, as a degree in bfloat16, at 256. What goes
    on with it, or with sums that are sorted, as of a node's rows, is then off by as much."""
    return s.node.meta["val"].element_size() == 2 and s.how in ("sum", "mean")


def _tables(found: Sequence[Sum], places: Mapping[fx.Node, int]) -> list[list[Sum]]:
    """Gradients of tables whose rows lie in one matrix, as those of an interaction of their lookups do."""
    by_matrix: dict[tuple[fx.Node, int], list[Sum]] = defaultdict(list)
    for s in found:
        (part, *others), count = s.parts, s.node.meta["val"].shape[0]
        if part.node.target is aten.embedding_dense_backward.default and not others and isinstance(count, int):
            by_matrix[part.matrix, part.features].append(s)
    last = {matrix: max(places[s.node] for s in tables) for matrix, tables in by_matrix.items()}
    return [
        tables
        for matrix, tables in by_matrix.items()
        if len(tables) > 1 and all(places[user] > last[matrix] for s in tables for user in s.node.users)
    ]


def _paying(found: Sequence[Sum], same: Mapping[fx.Node, fx.Node], least: float) -> tuple[list[Sum], list[list[Sum]]]:
    """Sums whose sort does not pay; and the others, together where they share one."""
    groups = _by_sort(found, same)
    paying = [together for together in groups if _pays(together[:1], [[s] for s in together], least)]
    return [s for together in groups if together not in paying for s in together], paying


def _by_sort(found: Sequence[Sum], same: Mapping[fx.Node, fx.Node]) -> list[list[Sum]]:
    """Those together that share a sort."""
    by_sort: dict[tuple[Any, ...], list[Sum]] = defaultdict(list)
    for s in found:
        indices = tuple(same.get(p.index, p.index) for p in s.parts)
        by_sort[indices, expression(s.node.meta["val"].shape[0])].append(s)
    return list(by_sort.values())


def _pays(sorted_together: Sequence[Sum], launches: Sequence[Sequence[Sum]], least: float = 1.0) -> bool:
    """Whether sums in sorted order take less than atomics do, their one sort counted ``least`` times.

    torch's own deterministic sums sort for each of them.

    Args:
        sorted_together: whose rows are sorted; other sums along the same indices need no sort of their own.
        launches: all sums, by the launch that makes them.
    """
    if torch.are_deterministic_algorithms_enabled():
        return True
    sort_us = sums_by_index.sort(sum(map(_edges, sorted_together))).us
    return sum(sum(map(atomics_us, one)) - sum_us(one) for one in launches) > least * sort_us


def atomics_us(s: Sum) -> float:
    """What torch's and Inductor's kernels take."""
    table = s.node.target is aten.embedding_dense_backward.default
    added = [(_edges_of(p) * p.features, _element_us(p, s.how)) for p in s.parts]
    return sums_by_index.atomics(added, prod(map(hint, s.node.meta["val"].shape)) if table else 0.0).us


def _element_us(part: Part, how: str) -> float:
    # PyTorch has the kernel of an ``index_add``, but of float32, which Inductor compiles.
    is_left = packet(part.node) is aten.index_add and not by_atomics(part.node)
    added = how in ("sum", "mean") and not is_table_gradient(part.node) and not is_left
    size = min(4, part.node.meta["val"].element_size())
    return sums_by_index.ADDED_US[size] if added else sums_by_index.ATOMIC_US


def sum_us(together: Sequence[Sum]) -> float:
    """What one launch takes that makes all of these, without the sort."""
    return sums_by_index.sums(
        _row_bytes(together[0]), [(_edges(s), hint(s.node.meta["val"].shape[0])) for s in together]
    ).us


def _edges(s: Sum) -> int:
    return sum(map(_edges_of, s.parts))


def _edges_of(part: Part) -> int:
    return prod(map(hint, part.index.meta["val"].shape))


def _row_bytes(s: Sum) -> int:
    return s.parts[0].features * s.node.meta["val"].element_size()


def _rows(s: Sum) -> int:
    """Of the matrix, or more."""
    return sum(p.every * _edges_of(p) for p in s.parts)


def kernels_of(node: fx.Node, touched: Moved) -> tuple[Kernel, ...]:
    """The kernel of one of ``TARGETS``."""
    if node.target is SEGMENT_REDUCE:
        by: Any = node.args[2] or node.args[1]
        edges, nodes = (x.meta["val"].shape for x in (by, node))
        work = Own("segment_sum", float(hint(edges[0])), float(prod(map(hint, nodes[1:]))))
    else:
        edges = float(hint(node.all_input_nodes[0].meta["val"].shape[0]))
        work = Own("sort", edges, 1.0) if node.target is SEGMENTS else Stream(max(1.0, edges))
    return (Kernel(node.name, work, touched.reads, touched.writes, (target_name(node),), source(node)),)
