"""An op of the IR as a generalised einsum: combine operands element by element, then sum over what the result lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import reduce

import torch
from torch import Tensor

from tilestream.ir.derive import sums
from tilestream.ir.pipeline import TileOp
from tilestream.reference.ops import BINARY, UNARY, elementwise

COMBINE: dict[str, tuple[float, Callable[[Tensor, Tensor], Tensor]]] = {
    "sum": (0.0, torch.add),
    "max": (-torch.inf, torch.maximum),
    "min": (torch.inf, torch.minimum),
    "mul": (1.0, torch.mul),
    "softmax": (0.0, torch.add),
}
"""What summing may mean: its value of nothing, and of two (of softmaxes: weighed, ``together``)."""

Weighed = tuple[Tensor, Tensor]
"""The softmax of a part, and the logarithm of its sum of ``exp(score)``: what a part weighs beside others."""


def softmax(op: TileOp, operands: Sequence[Tensor], lengths: dict[str, int]) -> Weighed:
    """The values of ``op`` weighted by the softmax of its score over these positions; both as ``op.result_axes``."""
    kept, summed = op.result_axes, sorted(sums(op))
    order = (*kept, *summed)
    score, *values = (align(x, v.axes, order) for x, v in zip(operands, op.views, strict=True))
    rows = [lengths[a] for a in kept]
    score = score.expand([lengths[a] for a in order]).reshape(*rows, -1)
    value = _each(op, values, score.dtype).expand([lengths[a] for a in order]).reshape(*rows, -1)
    return (score.softmax(-1) * value).sum(-1), score.logsumexp(-1)


def together(a: Weighed, b: Weighed) -> Weighed:
    """The softmax of two parts as one. A part of nothing, or of scores of ``-inf`` alone, has no weight beside one."""
    weight = torch.logaddexp(a[1], b[1])
    of_a = torch.where(a[1] == -torch.inf, torch.zeros_like(weight), (a[1] - weight).exp())
    of_b = torch.where(b[1] == -torch.inf, torch.zeros_like(weight), (b[1] - weight).exp())
    parts = torch.where(of_a == 0, 0.0, of_a * a[0]) + torch.where(of_b == 0, 0.0, of_b * b[0])
    return torch.where(weight == -torch.inf, a[0] + b[0], parts), weight


def align(value: Tensor, axes: Sequence[str], order: Sequence[str]) -> Tensor:
    """``value`` with its dimensions in ``order``, and of length 1 where it lacks an axis."""
    value = value.permute([axes.index(a) for a in order if a in axes])
    return value[tuple(slice(None) if a in axes else None for a in order)]


def evaluate(op: TileOp, operands: Sequence[Tensor], lengths: dict[str, int], dtype: torch.dtype) -> Tensor:
    """The part of ``op``'s result that these parts of its operands give.

    Args:
        operands: one a view of ``op`` (but for what a store writes), dimensions as ``View.axes``.
        lengths: positions of each axis that ``op`` mentions.

    Returns:
        Dimensions as ``op.result_axes``.
    """
    kept = op.result_axes
    summed = sorted(sums(op))
    views = op.views[: len(operands)]
    if op.kind == "fill":
        return torch.full([lengths[a] for a in kept], float(op.attr("value", 1.0) or 0), dtype=dtype)
    if op.kind == "product" and op.combine == "sum":
        letters = {a: chr(97 + i) for i, a in enumerate((*kept, *summed))}
        given = [a for a in kept if any(a in v.axes for v in views)]
        terms = ["".join(letters[a] for a in v.axes) for v in views]
        value = torch.einsum(f"{','.join(terms)}->{''.join(letters[a] for a in given)}", *operands)
        return align(value, given, kept).expand([lengths[a] for a in kept])
    order = (*kept, *summed)
    parts = [align(x, v.axes, order) for x, v in zip(operands, views, strict=True)]
    value = _each(op, parts, dtype).expand([lengths[a] for a in order])
    if not summed:
        return value
    value = value.reshape(*value.shape[: len(kept)], -1)
    if op.combine == "sum":
        return value.sum(-1)
    return {"max": value.amax, "min": value.amin, "mul": value.prod}[op.combine](-1)


def _each(op: TileOp, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    if op.kind in UNARY or op.kind in BINARY:
        return elementwise(op, parts, dtype)
    return reduce(torch.mul if op.kind == "product" else torch.add, parts)  # a cat is the sum of its shifted parts
