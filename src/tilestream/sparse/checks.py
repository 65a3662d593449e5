"""A program's values beside PyTorch's in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tilestream.errors import SparseError
from tilestream.sparse.schedule import Schedule

if TYPE_CHECKING:
    from tilestream.sparse.load import Target

TOLERANCE = 1e-9
"""Of the largest value: what differs by more is wrong."""


@dataclass(frozen=True)
class Check:
    """``error``: the largest difference as a share of the largest value. ``on``: what was compared."""

    error: float
    on: str = "dense PyTorch"

    @property
    def ok(self) -> bool:
        return self.error < TOLERANCE

    def __str__(self) -> str:
        words = "within" if self.ok else "OUTSIDE"
        return f"values: largest error {self.error:.1e} of the largest value, {words} {TOLERANCE:g} of {self.on}"


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference as a share of the largest finite value (of 1 at least); infinite where one is infinite or
    not a number and the other is not."""
    got, want = (x if x.layout == torch.strided else x.to_dense() for x in (got, want))
    want = want.double()
    apart = ~((got == want) | (got.isnan() & want.isnan()))
    if not bool(apart.any()):
        return 0.0
    finite = want[want.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    worst = (got[apart] - want[apart]).abs().max()
    return float(worst) / scale if bool(worst.isfinite()) else float("inf")


def compare(outputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor]) -> Check:
    """What a run gave beside what PyTorch gives."""
    return Check(max((difference(a, b) for a, b in zip(outputs, expected, strict=True)), default=0.0))


def check(target: Target, made: Any, schedule: Schedule) -> Check | None:
    """What ``target`` gave (``made``, a ``ProgramResult``) beside PyTorch.

    Where a dense run would be too large, an instance of its first rows and columns is run and compared instead; None if
    there is no such thing (a module, whose weights have sizes of their own).
    """
    try:
        return compare(made.outputs, target.reference())
    except SparseError:
        smaller = target.smaller()
    if smaller is None:
        return None
    ran = smaller.make(schedule).run(*smaller.inputs)
    return Check(compare(ran.outputs, smaller.reference()).error, f"dense PyTorch on {smaller.name}")
