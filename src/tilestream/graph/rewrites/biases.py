"""Biases that stand apart from their product, as of linears whose rows do not lie one behind the other, in it."""

from __future__ import annotations

from typing import Any

from torch import fx

from tilestream.graph.nodes import RESHAPES, aten, keeps_features, packet, value
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.settings import Settings


@each(aten.add)
def join_biases(node: fx.Node, _: Settings) -> fx.Node | None:
    """``add(view(mm(rows, weight)), bias)`` as ``view(addmm(bias, rows, weight))``, where nobody reads what is between.
    Rounded once, not twice, and no kernel's work of its own."""
    if len(node.args) != 2 or node.kwargs:
        return None
    views: list[fx.Node] = []
    product: Any = node.args[0]
    while isinstance(product, fx.Node) and packet(product) in RESHAPES and len(product.users) == 1:
        if not keeps_features(product):
            return None
        views.append(product)
        product = product.args[0]
    if not isinstance(product, fx.Node) or packet(product) is not aten.mm or len(product.users) != 1:
        return None
    if not _is_bias(node.args[1], product, node):
        return None
    made = call(node, aten.addmm.default, node.args[1], *product.args)
    for view in reversed(views):
        made = call(node, view.target, made, *view.args[1:])
    return made


def _is_bias(node: Any, product: fx.Node, made: fx.Node) -> bool:
    vector, result, total = value(node), value(product), value(made)
    if vector is None or result is None or total is None or vector.dim() != 1:
        return False
    return vector.shape[0] == result.shape[1] and vector.dtype == result.dtype == total.dtype
