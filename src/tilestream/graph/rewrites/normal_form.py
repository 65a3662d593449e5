"""The normal form of a graph, in which selection can treat each use of a view by itself, and a layer is a layer: biases
that stand apart from their product are in it, factors as GIN's ``1 + eps`` are no sums, products of batches by one
matrix are products of rows.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from tilestream.graph.nodes import (
    RESHAPES,
    argument,
    aten,
    integer,
    is_constant,
    is_view,
    keeps_features,
    packet,
    value,
)
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.sizes import same_size


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


@each(aten.bmm)
def fold_batches(node: fx.Node, _: Settings) -> fx.Node | None:
    """``bmm(x, expanded)`` as a product of all rows of ``x``, copied where they lie otherwise.

    PyTorch 2.11 has a linear whose rows do not lie one behind the other, as over the tokens of images whose channels
    lie last, as a product of batches with the weight expanded; later ones copy the rows. Only of rows is it a layer.
    """
    weight, x = _expanded(node.args[1]), _unexpanded(node.args[0])
    if weight is None or (rows := value(x)) is None:
        return None
    batches, count = rows.shape[:2]
    if not isinstance(count, int) and not isinstance(batches, int):
        return None
    if not rows.is_contiguous():
        x = call(node, aten.clone.default, x, memory_format=torch.contiguous_format)
    depth, features = weight.meta["val"].shape
    made = call(node, aten.mm.default, call(node, aten.view.default, x, [-1, depth]), weight)
    return call(
        node, aten.view.default, made, [-1, count, features] if isinstance(count, int) else [batches, -1, features]
    )


def _expanded(node: Any) -> fx.Node | None:
    """The matrix that a value of three dimensions repeats, if it is a view of one."""
    fake = value(node)
    if fake is None or fake.dim() != 3 or fake.stride(0) != 0 or same_size(fake.shape[0], 1):
        return None
    while isinstance(node, fx.Node) and is_view(node):
        node = node.args[0]
        found = value(node)
        if found is not None and found.dim() == 2:
            same = all(map(same_size, found.shape, fake.shape[1:])) and found.stride() == fake.stride()[1:]
            return node if same else None
    return None


def _unexpanded(node: Any) -> Any:
    """What a view of the same shape shows."""
    while isinstance(node, fx.Node) and packet(node) in (aten.expand, *RESHAPES):
        before, after = value(node.args[0]), value(node)
        if before is None or after is None or before.shape != after.shape:
            break
        node = node.args[0]
    return node
