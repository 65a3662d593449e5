"""Rewrites of views, so that selection can treat each use of a view by itself; and of maxima over rows."""

from __future__ import annotations

import operator

import torch
from torch import fx

from tilestream.graph.nodes import MATMULS, argument, integer, is_constant, is_view, packet, value
from tilestream.ir.tileops import GROUP

aten = torch.ops.aten


def split_to_slices(graph: fx.Graph) -> None:
    """``getitem(split(x), i)`` becomes ``slice(x)``, where the sizes are constants."""
    for node in list(graph.nodes):
        if node.target is not operator.getitem or not isinstance(node.args[0], fx.Node):
            continue
        whole, index = node.args[0], node.args[1]
        bounds = _bounds(whole, index)
        if bounds is None:
            continue
        with graph.inserting_before(node):
            dim = integer(whole, 2, "dim", 0)
            part = graph.call_function(aten.slice.Tensor, (whole.args[0], dim, *bounds))
        part.meta = {**whole.meta, **node.meta}
        node.replace_all_uses_with(part)
        graph.erase_node(node)


def unlift_constants(graph: fx.Graph) -> None:
    """Use a constant itself where the trace copies it first: nothing mutates it. Results keep their copy."""
    for node in list(graph.nodes):
        lifted = packet(node) in (aten.lift_fresh_copy, aten.lift_fresh) and isinstance(node.args[0], fx.Node)
        if lifted and is_constant(node.args[0]) and not any(u.op == "output" for u in node.users):
            node.replace_all_uses_with(node.args[0])
            graph.erase_node(node)


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


def squeeze_out_of_place(graph: fx.Graph) -> None:
    """``squeeze_``, which torch leaves behind products of vectors, as ``squeeze``: its copies would squeeze again."""
    for node in graph.nodes:
        if packet(node) is aten.squeeze_:
            node.target = getattr(aten.squeeze, node.target._overloadname)


def share_nothing(graph: fx.Graph) -> None:
    """Give every user of a view a copy of the view, last views first, so that chains are copied whole."""
    for node in reversed(list(graph.nodes)):
        if node.op != "call_function" or not is_view(node) or value(node) is None:
            continue
        for user in list(node.users)[1:]:
            with graph.inserting_after(node):
                copy = graph.node_copy(node, lambda n: n)
            user.replace_input_with(node, copy)


def split_maxima(graph: fx.Graph) -> None:
    """``amax`` over the rows of what a linear makes becomes one over every 16 rows, which a kernel has in a warp, and
    one over what is left: ``[n, p, f]`` to ``[n, p / 16, f]`` to ``[n, f]``. Which is the same, in any order."""
    for node in list(graph.nodes):
        x = node.args[0] if packet(node) is aten.amax and node.args else None
        if not isinstance(x, fx.Node) or not _can_split(node, x):
            continue
        fake = value(x)
        assert fake is not None
        shape = [
            -1 if fake.dim() == 3 else fake.shape[0],
            *fake.shape[1:-2],
            fake.shape[-2] // GROUP,
            GROUP,
            fake.shape[-1],
        ]
        with graph.inserting_before(node):
            grouped = graph.call_function(aten.view.default, (x, shape))
            most = graph.call_function(aten.amax.default, (grouped, [fake.dim() - 1]))
        told = {k: v for k, v in node.meta.items() if k != "val"}
        grouped.meta = {**told, "val": fake.view(shape)}
        most.meta = {**told, "val": grouped.meta["val"].amax(fake.dim() - 1)}
        node.update_arg(0, most)


def join_maxima(graph: fx.Graph) -> None:
    """Undo ``split_maxima`` where no region has taken the first half."""
    for node in list(graph.nodes):
        most = node.args[0] if packet(node) is aten.amax and node.args else None
        if isinstance(most, fx.Node) and is_of_groups(most) and len(most.users) == 1:
            grouped = most.args[0]
            assert isinstance(grouped, fx.Node)
            node.update_arg(0, grouped.args[0])
            graph.erase_node(most)
            if not grouped.users:
                graph.erase_node(grouped)


def is_of_groups(node: fx.Node) -> bool:
    """Whether ``node`` is the first of two maxima that ``split_maxima`` made of one."""
    grouped = node.args[0] if packet(node) is aten.amax and node.args else None
    if not isinstance(grouped, fx.Node) or packet(grouped) is not aten.view:
        return False
    fake = value(grouped)
    return fake is not None and fake.dim() > 3 and fake.shape[-2] == GROUP and list(node.args[1:]) == [[fake.dim() - 2]]


def _can_split(node: fx.Node, x: fx.Node) -> bool:
    fake, dims = value(x), argument(node, 1, "dim", [])
    if fake is None or fake.dim() < 3 or not fake.is_contiguous() or fake.dtype not in (torch.bfloat16, torch.float16):
        return False
    if not isinstance(dims, list | tuple) or [d % fake.dim() for d in dims if isinstance(d, int)] != [fake.dim() - 2]:
        return False
    if not all(isinstance(n, int) for n in (fake.shape[1:] if fake.dim() == 3 else fake.shape)):
        return False
    points, features = fake.shape[-2:]
    return points % GROUP == 0 and points > GROUP and features % 64 == 0 and _is_made_by_linear(x)


def _is_made_by_linear(node: fx.Node) -> bool:
    """Whether ``node`` is a linear's result, under any view, and with ops of one operand behind it."""
    while packet(node) not in MATMULS:
        tensors = [a for a in node.all_input_nodes if value(a) is not None]
        if node.op != "call_function" or len(tensors) != 1 or packet(node) in (aten.slice, aten.select):
            return False
        node = tensors[0]
    return True
