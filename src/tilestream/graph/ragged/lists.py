"""Edge lists of a graph: what was sorted (``tilestream::segments``), and which operators reduce by it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import sympy
from torch import fx

from tilestream.graph.nodes import Unsupported, argument, aten, is_gather, packet, value
from tilestream.graph.operators.gathers import table_and_index
from tilestream.graph.rewrites.operators import INDEX, SEGMENT_REDUCE
from tilestream.graph.sizes import expression


@dataclass(frozen=True)
class Edges:
    """A list of edges that is sorted, or that lie side by side, node by node.

    Attributes:
        index: where each edge goes, [edges], in the edges' own order; None where the graph does not have it.
        order, starts, busy: as ``tilestream::segments`` has them. Edges that lie side by side have neither ``order``
            nor ``busy``.
        edges, nodes: how many.
    """

    index: fx.Node | None
    order: fx.Node | None
    starts: fx.Node
    busy: fx.Node | None
    edges: sympy.Expr
    nodes: sympy.Expr

    @property
    def sort(self) -> tuple[fx.Node, fx.Node]:
        """Order and busy nodes of a list that is sorted."""
        assert self.order is not None and self.busy is not None
        return self.order, self.busy


def sorted_lists(graph: fx.Graph, same: Mapping[fx.Node, fx.Node]) -> list[Edges]:
    """The lists by which rows of a graph are reduced.

    Args:
        same: of each integer tensor the first that is computed alike (``first_alike``).
    """
    names = {node.name: node for node in graph.nodes}
    found: dict[tuple[Any, Any], Edges] = {}
    for node in graph.find_nodes(op="call_function", target=SEGMENT_REDUCE):
        order, starts, busy = node.args[2:5]
        if (order, starts) in found or (order is not None and INDEX not in order.meta):
            continue
        named = None if order is None else names.get(order.meta[INDEX])  # a backward graph may not have it
        index = None if named is None else same.get(named, named)
        sizes = (order or node.args[1]).meta["val"].shape[0], starts.meta["val"].shape[0] - 1
        found[order, starts] = Edges(index, order, starts, busy, *map(expression, sizes))
    return list(found.values())


@dataclass(frozen=True)
class Gather:
    """Rows ``table[index]``, one an edge."""

    table: fx.Node
    index: fx.Node


def gather_of(node: object, same: Mapping[fx.Node, fx.Node]) -> Gather | None:
    """What a node gathers, if that is rows by one index of one dimension.

    Args:
        same: of each integer tensor the first that is computed alike (``first_alike``).
    """
    if not isinstance(node, fx.Node) or not is_gather(node):
        return None
    try:
        table, index = table_and_index(node)
    except Unsupported:
        return None
    names = value(index)
    if names is None or names.dim() != 1 or names.dtype.is_floating_point or str(names.dtype) == "torch.bool":
        return None
    if packet(node) is aten.embedding and argument(node, 3, "scale_grad_by_freq", False):
        return None
    return Gather(table, same.get(index, index))
