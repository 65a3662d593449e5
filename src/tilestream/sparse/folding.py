"""Along which dimensions what an operator makes is folded next: the fibers of a mask that must not be lost."""

from __future__ import annotations

from typing import Any

import torch

MASKING = frozenset(("masked_fill", "where"))
"""Operators that may drop what they mask."""
SOFTMAX = frozenset(("softmax", "_softmax", "_safe_softmax"))
"""Operators for which a large negative number is as good as minus infinity beside any score."""

_SAFE = frozenset(("_safe_softmax", "scaled_dot_product_attention"))
_FOLDS = SOFTMAX | frozenset(
    "log_softmax _log_softmax logsumexp sum mean amax amin max min any all std var norm linalg_vector_norm prod".split()
)
_ENDS = frozenset(("exp", "sigmoid"))
"""Operators of which minus infinity is 0: nothing is lost behind them."""


def operator_name(node: torch.fx.Node) -> str:
    """``add`` of ``aten.add.Tensor``."""
    return named(node.target)


def named(target: Any) -> str:
    """The same of an overload."""
    name = str(target).rsplit(".", 1)[0] if isinstance(target, torch._ops.OpOverload) else str(target)
    return name.removeprefix("aten.").removeprefix("tilestream_sparse.")


def folded(node: torch.fx.Node) -> frozenset[int] | None:
    """Dimensions, from the last (-1), along which the result of ``node`` is folded, as it is or after elementwise
    operators; None if that cannot be seen. Attention and its softmax fold safely: minus infinity everywhere is 0."""
    found: set[int] = set()
    finite = not any(isinstance(x, float | int) and x == float("-inf") for x in node.args)
    stack, seen = list(node.users), set(node.users)
    shape = _shape(node)
    while stack:
        user = stack.pop()
        name = operator_name(user).removesuffix("_") if operator_name(user) not in _FOLDS else operator_name(user)
        if user.op == "output" or name in _ENDS or (name in _SAFE and not finite):
            continue
        if name in _FOLDS:
            dims = user.args[1] if len(user.args) > 1 else user.kwargs.get("dim")
            dims = [dims] if isinstance(dims, int) else dims
            if not isinstance(dims, list | tuple) or not all(isinstance(d, int) for d in dims):
                return None
            rank = len(_shape(user.all_input_nodes[0]))
            found |= {d - rank if d >= 0 else d for d in dims if isinstance(d, int)}
            continue
        made = _shape(user)
        if len(made) < len(shape) or made[len(made) - len(shape) :] != shape or name in ("matmul", "mm", "bmm"):
            return None
        new = [one for one in user.users if one not in seen]
        seen.update(new)
        stack += new
    return frozenset(found)


def _shape(node: torch.fx.Node) -> tuple[int, ...]:
    value = node.meta.get("val")
    return tuple(int(n) for n in value.shape) if isinstance(value, torch.Tensor) else (-1,)
