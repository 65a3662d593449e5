"""Factors that are a number of the model and one, as GIN's ``1 + eps``."""

from __future__ import annotations

from torch import fx

from tilestream.graph.nodes import aten, packet, value
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.settings import Settings


@each(aten.mul)
def open_factors(node: fx.Node, _: Settings) -> fx.Node | None:
    """``(s + 1) * x`` as ``s * x + x``, where ``s`` has one element: the sum of two numbers would be a launch of its
    own. It is rounded once less."""
    if len(node.args) != 2 or node.kwargs:
        return None
    for factor, rows in (node.args, node.args[::-1]):
        if not isinstance(factor, fx.Node) or not isinstance(rows, fx.Node) or not _is_one_more(factor):
            continue
        made, read, scaled = value(factor), value(rows), value(node)
        if made is None or read is None or scaled is None or not made.dtype == read.dtype == scaled.dtype:
            continue
        if made.numel() == 1 and read.shape == scaled.shape and read.is_floating_point():
            (number,) = factor.all_input_nodes
            return call(node, aten.add.Tensor, call(node, aten.mul.Tensor, rows, number), rows)
    return None


def _is_one_more(node: fx.Node) -> bool:
    plain = packet(node) is aten.add and len(node.args) == 2 and not node.kwargs and len(node.users) == 1
    numbers = [a for a in node.args if not isinstance(a, fx.Node)]
    made, given = value(node), [value(n) for n in node.all_input_nodes]
    same = made is not None and all(g is not None and g.dtype == made.dtype for g in given)
    return plain and same and numbers == [1]
