"""Questions about ATen nodes: which operator, which arguments, is it only a view."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tilestream.graph.sizes import same_size

aten = torch.ops.aten

MATMULS = {aten.mm, aten.addmm, aten.linear, aten.bmm}
"""Operators that apply a weight to rows."""

VIEWS = {
    *(aten.view, aten._unsafe_view, aten.reshape, aten.unsqueeze, aten.squeeze, aten.t, aten.permute, aten.transpose),
    *(aten.expand, aten.detach, aten.alias, aten.slice, aten.select, aten.split, aten.split_with_sizes, aten.unbind),
    *(aten.as_strided, aten.view_as_complex, aten.view_as_real, aten.diagonal, aten.lift_fresh_copy, aten.unfold),
    *(aten.chunk, aten.narrow, aten.flatten, aten.unflatten, aten.squeeze_, aten.real, aten.imag),
}
"""Operators that only look at their operand in another way: free outside a region."""


RESHAPES = (aten.view, aten._unsafe_view, aten.reshape)
"""Those that leave elements in their order."""

GATHERS = {aten.index, aten.index_select, aten.embedding}
"""Operators that take rows through an index."""

DERIVATIVES = {
    aten.threshold_backward, aten.hardtanh_backward, aten.sigmoid_backward, aten.tanh_backward, aten.silu_backward,
    aten.gelu_backward, aten.elu_backward, aten.leaky_relu_backward, aten.softplus_backward, aten.hardsigmoid_backward,
    aten.hardswish_backward, aten.mish_backward,
}  # fmt: skip
"""Of activations, element by element. Not all of them are tagged so."""
ASSERTIONS = {
    aten._assert_scalar,
    aten._assert_async,
    aten._assert_tensor_metadata,
    aten.sym_constrain_range,
    aten.sym_constrain_range_for_size,
}
"""Operators that only check."""


class Unsupported(Exception):
    """A node that cannot be a tile op; the text says why. Never leaves the front end."""

    def __init__(self, reason: str, node: fx.Node | None = None) -> None:
        self.reason = reason
        self.node = node
        super().__init__(reason)


def value(node: object) -> torch.Tensor | None:
    """The fake tensor of a node; ``None`` for SymInts, tuples and nodes without one, and for what is no node."""
    fake = node.meta.get("val") if isinstance(node, fx.Node) else None
    return fake if isinstance(fake, torch.Tensor) else None


def tensor_of(node: object) -> torch.Tensor:
    """The fake tensor of an operand.

    Raises:
        Unsupported: it is none.
    """
    fake = value(node)
    if fake is None:
        raise Unsupported("an operand is not a tensor")
    return fake


def packet(node: fx.Node) -> Any:
    """The operator without its overload; the target itself where it is no ATen operator."""
    return getattr(node.target, "overloadpacket", node.target)


def name(node: fx.Node) -> str:
    """The operator's name as users know it, ``aten.addmm.default``."""
    whole = str(node.target)
    return whole if isinstance(node.target, torch._ops.OpOverload) else getattr(node.target, "__name__", whole)


def is_view(node: fx.Node) -> bool:
    """Whether ``node`` only makes views: nothing is computed or moved."""
    if node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        return packet(node.args[0]) in VIEWS
    return packet(node) in VIEWS


def is_result(node: fx.Node) -> bool:
    """Whether a graph returns a node, or a view of it: whoever called sees its strides."""
    return any(user.op == "output" or (is_view(user) and is_result(user)) for user in node.users)


def results_of(graph: fx.Graph) -> Sequence[Any]:
    """What a graph returns: nodes, or None in their places."""
    found: Any = graph.output_node().args[0]
    return found


def behind(node: fx.Node, through: Callable[[fx.Node], bool]) -> fx.Node:
    """What a node is made of by any number of operators ``through`` which it is seen."""
    while through(node) and isinstance(before := node.args[0], fx.Node):
        node = before
    return node


def keeps_features(view: fx.Node) -> bool:
    """Whether a view shows the last dimension of what it views as its own last."""
    before, after = value(view.args[0]), value(view)
    if before is None or after is None or not before.dim() or not after.dim():
        return False
    return same_size(before.shape[-1], after.shape[-1])


def sums_rows(node: fx.Node) -> bool:
    """Whether ``node`` sums over all dimensions but the last."""
    dims = argument(node, 1, "dim")
    if packet(node) is not aten.sum or not isinstance(dims, list | tuple):
        return False
    summed = value(node.args[0])
    rank = 0 if summed is None else summed.dim()
    return rank > 1 and {d % rank for d in dims if isinstance(d, int)} == set(range(rank - 1))


def first_alone(node: fx.Node) -> bool:
    """Whether of several results only the first is used."""
    return all(user.target is operator.getitem and user.args[1] == 0 for user in node.users)


def permutation(node: fx.Node) -> list[int] | None:
    """In which order a transpose or a permutation has the dimensions of its operand; None of another operator."""
    before = value(node.args[0]) if packet(node) in (aten.t, aten.transpose, aten.permute) else None
    if before is None:
        return None
    order, dims = list(range(before.dim())), node.args[1:] if packet(node) is not aten.t else (0, 1)
    if packet(node) is aten.permute:
        listed: Any = argument(node, 1, "dims")
        return [d % len(order) for d in listed]
    if len(order) > 1:
        a, b = (d % len(order) for d in dims if isinstance(d, int))
        order[a], order[b] = order[b], order[a]
    return order


def readers(node: fx.Node, through: Callable[[fx.Node], bool] = is_view) -> list[fx.Node]:
    """What reads a node, or a view of it; ``through``: which users count as such."""
    return [r for user in node.users for r in (readers(user, through) if through(user) else [user])]


def is_slice(node: fx.Node) -> bool:
    """Whether ``node`` takes part of its operand's features, and nothing else."""
    if packet(node) not in (aten.slice, aten.select) or not isinstance(node.args[0], fx.Node):
        return False
    before = value(node.args[0])
    dim = argument(node, 1, "dim", 0)
    return before is not None and isinstance(dim, int) and before.dim() > 0 and dim % before.dim() == before.dim() - 1


def is_gather(node: fx.Node) -> bool:
    """Whether ``node`` takes rows of its operand through an index."""
    return packet(node) in GATHERS


def is_product(node: fx.Node) -> bool:
    """Whether ``node`` is a matrix product that sums over more than one element."""
    if packet(node) not in MATMULS:
        return False
    x = node.args[1] if packet(node) is aten.addmm else node.args[0]
    fake = value(x)
    return fake is not None and fake.dim() > 0 and not same_size(fake.shape[-1], 1)


def is_constant(node: fx.Node) -> bool:
    """Whether ``node`` is a tensor that the model's code made (``torch.tensor(1.5)``)."""
    return node.op == "get_attr" and value(node) is not None


def is_sym(node: fx.Node) -> bool:
    """Whether ``node`` is arithmetic on sizes, or an assertion about them."""
    fake = node.meta.get("val")
    return packet(node) in ASSERTIONS or isinstance(
        fake, torch.SymInt | torch.SymFloat | torch.SymBool | int | float | bool
    )


def computes(node: fx.Node) -> bool:
    """Whether a node is an operator that computes or moves data: no view, no size, no part of a tuple."""
    return node.op == "call_function" and not is_view(node) and not is_sym(node) and node.target is not operator.getitem


def is_ours(node: fx.Node) -> bool:
    """Whether a node calls an operator of this package, which runs as a kernel as it is."""
    return getattr(node.target, "namespace", "") == "tilestream"


def arguments(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments of a node, of which fx does not say what they are."""
    return node.args


def argument(node: fx.Node, position: int, key: str, default: object = None) -> object:
    """An argument by position or keyword."""
    if len(node.args) > position:
        return node.args[position]
    return node.kwargs.get(key, default)


def number(node: fx.Node, position: int, key: str, default: float) -> float:
    """A numeric argument.

    Raises:
        Unsupported: it is symbolic.
    """
    found = argument(node, position, key, default)
    if found is None:
        return default
    if isinstance(found, bool | int | float):
        return float(found)
    raise Unsupported(f"argument {key} is not a constant")


def integer(node: fx.Node, position: int, key: str, default: int | None = None) -> int:
    """An integer argument.

    Raises:
        Unsupported: it is symbolic, or missing without a default.
    """
    found = argument(node, position, key, default)
    if isinstance(found, int):
        return found
    raise Unsupported(f"argument {key} is not a constant")


def last_dim(node: fx.Node, x: object, dim: object) -> None:
    """Raise unless ``dim`` (an int, or a list of one) is the feature dimension of ``x``."""
    fake = tensor_of(x)
    dims = [dim] if isinstance(dim, int) else list(dim) if isinstance(dim, list | tuple) else []
    if not fake.dim() or [d % fake.dim() for d in dims if isinstance(d, int)] != [fake.dim() - 1]:
        raise Unsupported("works along rows")


def takes_tf32() -> bool:
    """Whether tensor cores take float32 products: by torch's own flag, as it is set now."""
    return torch.get_float32_matmul_precision() != "highest"
