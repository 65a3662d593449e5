"""The normal form of a graph, in which selection can treat each use of a view by itself."""

from __future__ import annotations

import operator

from torch import fx

from tilestream.graph.nodes import argument, aten, integer, is_constant, is_view, packet, value
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.settings import Settings


def remove_dead(graph: fx.Graph, _: Settings) -> int:
    """Erase what nobody reads."""
    return int(graph.eliminate_dead_code())


@each(aten.lift_fresh_copy, aten.lift_fresh)
def unlift_constants(node: fx.Node, _: Settings) -> fx.Node | None:
    """Use a constant itself where the trace copies it first: nothing mutates it. Results keep their copy."""
    lifted = node.args[0]
    is_result = any(u.op == "output" for u in node.users)
    return lifted if isinstance(lifted, fx.Node) and is_constant(lifted) and not is_result else None


@each(operator.getitem)
def split_to_slices(node: fx.Node, _: Settings) -> fx.Node | None:
    """``getitem(split(x), i)`` becomes ``slice(x)``, where the sizes are constants."""
    whole, index = node.args
    bounds = _bounds(whole, index) if isinstance(whole, fx.Node) else None
    if bounds is None or not isinstance(whole, fx.Node):
        return None
    part = call(node, aten.slice.Tensor, whole.args[0], integer(whole, 2, "dim", 0), *bounds)
    part.meta = {**whole.meta, **node.meta}
    return part


def _bounds(whole: fx.Node, index: object) -> tuple[int, int] | None:
    x = value(whole.args[0]) if whole.args and isinstance(whole.args[0], fx.Node) else None
    if packet(whole) not in (aten.split, aten.split_with_sizes) or x is None or not isinstance(index, int):
        return None
    sizes, dim = whole.args[1], argument(whole, 2, "dim", 0)
    if isinstance(sizes, int) and isinstance(dim, int) and isinstance(x.shape[dim], int):
        return index * sizes, min((index + 1) * sizes, x.shape[dim])
    if not isinstance(sizes, list | tuple):
        return None
    constant = [s for s in sizes if isinstance(s, int)]
    if len(constant) < len(sizes):
        return None
    start = sum(constant[:index])
    return start, start + constant[index]


@each(aten.squeeze_)
def squeeze_out_of_place(node: fx.Node, _: Settings) -> fx.Node:
    """``squeeze_``, which torch leaves behind products of vectors, as ``squeeze``: its copies would squeeze again."""
    node.target = getattr(aten.squeeze, node.target._overloadname)  # pyright: ignore[reportAttributeAccessIssue]
    return node


def copy_views(graph: fx.Graph, _: Settings) -> int:
    """Give every user of a view a copy of the view, last views first, so that chains are copied whole."""
    made = 0
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or not is_view(node) or value(node) is None:
            continue
        for user in list(node.users)[1:]:
            with graph.inserting_after(node):
                copy = graph.node_copy(node, lambda n: n)
            user.replace_input_with(node, copy)
            made += 1
    return made
