"""Gradients of rows that were gathered for a layer: summed at their nodes first, multiplied there.

A layer on rows of nodes, ``y = v[index] W.T``, as it is part of ``cat([e, v[senders], v[receivers]]) W.T``, has

    dv = sum over edges of (dY W) = S W        dW = dY.T v[index] = S.T v        S = sum over edges of dY

where an edge's row is added to the node that its index names. Behind S there are as many rows as nodes: ``dY W`` is
neither made nor added up edge by edge, and ``v[index]`` is not gathered again for dW.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import sympy
from torch import fx

from tilestream.graph.gradients import transposed
from tilestream.graph.nodes import Unsupported, arguments, aten, is_gather, packet, value
from tilestream.graph.operators.gathers import table_and_index
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.joint import narrow_product
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.sizes import expression, hint
from tilestream.graph.sums import Part, first_alike, part_of

EDGES_A_NODE = 2
"""So many edges a node, at least: S is written and read twice, where before ``dY W`` and ``v[index]`` were."""


class _Key(NamedTuple):
    """What S is of: dY, the index, how many nodes there are."""

    gradient: fx.Node
    index: fx.Node
    nodes: sympy.Expr


def multiply_late(graph: fx.Graph, settings: Settings) -> int:
    """Add rows of dY up at nodes before they are multiplied, of 16-bit layers on so many edges; how many sums did.

    Args:
        graph: joint, functional ATen, whose ``dY.T cat(A, B)`` are ``cat(dY.T A, dY.T B)`` (``joint``). Changed
            in place, and in order.
    """
    same = first_alike(graph)
    parts = [part for node in graph.nodes if (part := _late(node, settings.least_rows)) is not None]
    sums: dict[_Key, fx.Node] = {}
    for part in parts:
        product, gradient = part.matrix, part.matrix.all_input_nodes[0]
        key = _Key(gradient, same.get(part.index, part.index), expression(part.node.meta["val"].shape[0]))
        if key not in sums:
            sums[key] = _sum(graph, part, gradient)
        with graph.inserting_before(part.node):
            weight, first = product.args[1], part.first * part.features
            if part.every > 1:
                weight = call(part.node, aten.slice.Tensor, weight, 1, first, first + part.features)
            part.node.replace_all_uses_with(call(part.node, aten.mm.default, sums[key], weight))
    for key, total in sums.items():
        for product, table in _weight_gradients(key, same):
            with graph.inserting_before(product):
                left = call(product, aten.t.default, total)
                product.replace_all_uses_with(call(product, aten.mm.default, left, table))
    graph.eliminate_dead_code()
    for product in {part.matrix: None for part in parts}:
        if product.users:
            narrow_product(product)
    return len(parts)


def _late(node: fx.Node, least_rows: int) -> Part | None:
    """What ``node`` adds, where that is columns of a product ``dY W`` to rows of zeros, fewer than there are edges."""
    part = part_of(node)
    if part is None or node.target not in (aten.index_add.default, aten.index_put.default):
        return None
    zeros, gradient = node.args[0], part.matrix.args[0] if packet(part.matrix) is aten.mm else None
    if not isinstance(zeros, fx.Node) or zeros.target is not aten.new_zeros.default:
        return None
    if not isinstance(gradient, fx.Node) or (given := value(gradient)) is None or given.element_size() != 2:
        return None
    made, (edges, out) = node.meta["val"], given.shape
    if made.dim() != 2 or part.index.meta["val"].dim() != 1 or out != part.features:
        return None
    few = EDGES_A_NODE * hint(made.shape[0]) <= hint(edges) and hint(edges) >= least_rows
    return part if few else None


def _sum(graph: fx.Graph, part: Part, gradient: fx.Node) -> fx.Node:
    """Rows of dY added up as those of ``part``, as soon as all is there: products for dW may stand before these."""
    zeros = arguments(part.node)[0]
    of = {gradient, part.index, *(n for n in zeros.all_input_nodes if n is not zeros.args[0])}
    with graph.inserting_after(next(n for n in reversed(graph.nodes) if n in of)):
        clear = call(zeros, aten.new_zeros.default, gradient, zeros.args[1], **zeros.kwargs)
    with graph.inserting_after(clear):
        if part.node.target is aten.index_add.default:
            return call(part.node, aten.index_add.default, clear, 0, part.index, gradient)
        return call(part.node, aten.index_put.default, clear, [part.index], gradient, True)


def _weight_gradients(key: _Key, same: dict[fx.Node, fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """Products of dY and rows that were gathered from as many nodes by the same index, with these nodes' rows."""
    for turned in [n for n in key.gradient.users if transposed(n) is key.gradient]:
        for product in [n for n in turned.users if packet(n) is aten.mm and n.args[0] is turned]:
            rows = product.args[1]
            if not isinstance(rows, fx.Node) or not is_gather(rows):
                continue
            try:
                table, index = table_and_index(rows)
            except Unsupported:
                continue
            if same.get(index, index) is key.index and expression(table.meta["val"].shape[0]) == key.nodes:
                yield product, table
