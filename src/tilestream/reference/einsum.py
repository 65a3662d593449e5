"""An op of the IR as a generalised einsum: combine operands element by element, then sum over what the result lacks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from tilestream.ir.derive import result_axes, sums
from tilestream.ir.pipeline import TileOp
from tilestream.reference.ops import BINARY, UNARY, elementwise

COMBINE: dict[str, tuple[float, Callable[[Tensor, Tensor], Tensor]]] = {
    "sum": (0.0, torch.add),
    "max": (-torch.inf, torch.maximum),
    "mul": (1.0, torch.mul),
}
"""What summing may mean: its value of nothing, and of two."""


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
        Dimensions as ``result_axes(op)``.
    """
    kept = result_axes(op)
    summed = sorted(sums(op))
    views = op.views[: len(operands)]
    if op.kind == "product":
        letters = {a: chr(97 + i) for i, a in enumerate((*kept, *summed))}
        terms = ["".join(letters[a] for a in v.axes) for v in views]
        value = torch.einsum(f"{','.join(terms)}->{''.join(letters[a] for a in kept if _any(a, views))}", *operands)
        return align(value, [a for a in kept if _any(a, views)], kept).expand([lengths[a] for a in kept])
    order = (*kept, *summed)
    parts = [align(x, v.axes, order) for x, v in zip(operands, views, strict=True)]
    value = _each(op, parts, dtype).expand([lengths[a] for a in order])
    if not summed:
        return value
    value = value.reshape(*value.shape[: len(kept)], -1)
    if op.combine == "sum":
        return value.sum(-1)
    return value.amax(-1) if op.combine == "max" else value.prod(-1)


def _any(axis: str, views: Sequence) -> bool:
    return any(axis in v.axes for v in views)


def _each(op: TileOp, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
    if op.kind in UNARY or op.kind in BINARY:
        return elementwise(op, parts, dtype)
    total = parts[0]  # copies of all kinds; a concatenation is the sum of its shifted parts
    for part in parts[1:]:
        total = total + part
    return total
