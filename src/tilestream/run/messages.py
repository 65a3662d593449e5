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
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from tilestream.graph.nodes import aten
from tilestream.graph.sizes import expression
from tilestream.graph.sums import Sum, first_alike, sums
from tilestream.run import scatter_cost
from tilestream.run.sorted_sums import Sorted, Tables

MOST_ROW_BYTES = 8192
"""Of a row: 512 lanes."""


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
    places = {node: place for place, node in enumerate(graph.graph.nodes)}
    tables = [together for together in _tables(found, places) if _pays(together, [together])]
    taken = {s.node for together in tables for s in together}
    several, paying = _paying([s for s in found if len(s.parts) > 1], same)
    alone = [s for s in found if len(s.parts) == 1 and s.node not in taken]
    alone += [one for s in several for one in s.separate]
    paying += _paying(sorted(alone, key=lambda s: places[s.node]), same)[1]
    replaced: dict[fx.Node, fx.Node] = {}
    for together in tables:
        Tables(graph.graph, together, replaced).replace()
    for together in paying:
        Sorted(graph.graph, together, replaced).replace()
    if replaced:
        graph.graph.eliminate_dead_code()
        graph.graph.lint()
        graph.recompile()
    return sum(len(s.parts) for together in (*tables, *paying) for s in together)


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


def _paying(found: Sequence[Sum], same: Mapping[fx.Node, fx.Node]) -> tuple[list[Sum], list[list[Sum]]]:
    """Sums whose sort does not pay; and the others, together where they share one."""
    by_sort: dict[tuple[Any, ...], list[Sum]] = defaultdict(list)
    for s in found:
        indices = tuple(same.get(p.index, p.index) for p in s.parts)
        by_sort[indices, expression(s.node.meta["val"].shape[0])].append(s)
    paying = [together for together in by_sort.values() if _pays(together[:1], [[s] for s in together])]
    return [s for together in by_sort.values() if together not in paying for s in together], paying


def _pays(sorted_together: Sequence[Sum], launches: Sequence[Sequence[Sum]]) -> bool:
    """Whether sums in sorted order take less than atomics do, their one sort counted.

    torch's own deterministic sums sort for each of them. There are no times of fp32 atomics.

    Args:
        sorted_together: whose rows are sorted; other sums along the same indices need no sort of their own.
        launches: all sums, by the launch that makes them.
    """
    if torch.are_deterministic_algorithms_enabled():
        return True
    if sorted_together[0].node.meta["val"].element_size() != 2:
        return False
    sort = scatter_cost.sort_us(sum(scatter_cost.edges(p) for s in sorted_together for p in s.parts))
    gains = (sum(map(scatter_cost.atomics_us, one)) - scatter_cost.sum_us(one) for one in launches)
    return sum(gains) > sort


def _row_bytes(s: Sum) -> int:
    return s.parts[0].features * s.node.meta["val"].element_size()
