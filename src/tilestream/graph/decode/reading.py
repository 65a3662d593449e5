"""Nodes of a decoder's graph, read backwards through views and conversions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import fx

from tilestream.graph.nodes import Unsupported, aten, packet, value
from tilestream.graph.sizes import settled

SAME = (aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.alias, aten.clone, aten.detach)
"""What leaves elements in their order."""


class Weighted:
    """What has a weight, and perhaps a bias."""

    weight: fx.Node
    bias: fx.Node | None

    def noted(self, weights: dict[str, fx.Node], name: str) -> Self:
        """Itself, once its weight and bias have names."""
        weights[name] = self.weight
        if self.bias is not None:
            weights[f"{name}_bias"] = self.bias
        return self


def is_same(a: Any, b: Any, depth: int = 8) -> bool:
    """Whether two arguments are the same, or computed alike of the same: every layer makes a mask of its own."""
    if a is b or not (isinstance(a, fx.Node) and isinstance(b, fx.Node)):
        return a is b or (not isinstance(a, fx.Node) and not isinstance(b, fx.Node) and a == b)
    if depth == 0 or a.op != "call_function" or (a.target, a.kwargs, len(a.args)) != (b.target, b.kwargs, len(b.args)):
        return False
    return all(is_same(x, y, depth - 1) for x, y in zip(a.args, b.args, strict=True))


def peeled(node: Any) -> fx.Node:
    """A node behind views that leave the elements of one token in their order."""
    while isinstance(node, fx.Node) and node.op == "call_function":
        of = packet(node)
        if of not in SAME and not _is_no_move(node):
            break
        node = node.all_input_nodes[0]
    if not isinstance(node, fx.Node):
        raise Unsupported("a number where a tensor is wanted")
    return node


def _is_no_move(node: fx.Node) -> bool:
    """Whether dimensions are exchanged of which one at most has several elements, or a slice takes all."""
    of = packet(node)
    if of is aten.slice:
        return shape_of(node) == shape_of(node.args[0])
    if of is not aten.transpose:
        return False
    dims: Any = node.args[1:]
    first, second = sorted(d % len(shape_of(node)) for d in dims)
    return sum(n != 1 for n in shape_of(node)[first : second + 1]) <= 1


def cast(node: Any) -> fx.Node:
    """A node behind views and conversions."""
    node = peeled(node)
    while packet(node) is aten._to_copy:
        node = peeled(node.all_input_nodes[0])
    return node


def only(node: Any) -> fx.Node:
    """The one tensor that a node is computed of."""
    if not isinstance(node, fx.Node) or len(node.all_input_nodes) != 1:
        raise Unsupported("an operator of one tensor is wanted", node if isinstance(node, fx.Node) else None)
    return node.all_input_nodes[0]


def either(node: Any, is_first: Callable[[fx.Node], bool]) -> tuple[fx.Node, fx.Node]:
    """Both operands of a node, the one that is of a kind first."""
    made = peeled(node)
    if len(made.args) < 2 or not all(isinstance(a, fx.Node) for a in made.args[:2]):
        raise Unsupported(f"{made.target} has not two tensors", made)
    first, second = made.args[:2]
    if is_first(first):  # pyright: ignore[reportArgumentType]
        return first, second  # pyright: ignore[reportReturnType]
    return second, first  # pyright: ignore[reportReturnType]


def shape_of(node: Any) -> list[int]:
    fake = value(node)
    sizes = [] if fake is None else [settled(n) for n in fake.shape]
    if fake is None or not all(isinstance(n, int) for n in sizes):
        raise Unsupported("sizes are not known", node if isinstance(node, fx.Node) else None)
    return sizes  # pyright: ignore[reportReturnType]


def count_of(node: fx.Node) -> int:
    return int(torch.Size(shape_of(node)).numel())


def dtype_of(node: fx.Node) -> torch.dtype | None:
    fake = value(node)
    return None if fake is None else fake.dtype


def is_bf16(node: fx.Node) -> bool:
    return dtype_of(node) == torch.bfloat16


def is_plain(node: fx.Node) -> bool:
    fake = value(node)
    return fake is not None and fake.is_contiguous() and fake.dtype == torch.bfloat16
