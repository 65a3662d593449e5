"""A program's values beside PyTorch's in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from tilestream.errors import SparseError
from tilestream.run import oracle
from tilestream.sparse.outputs import LARGEST

if TYPE_CHECKING:
    from tilestream.sparse.load import Target
    from tilestream.sparse.program import Program

TOLERANCE = 1e-9
"""Of the largest value: what differs by more is wrong."""


@dataclass(frozen=True)
class Check:
    """``error``: the largest difference as a share of the largest value. ``on``: what was compared. ``tolerance``: what
    floats as narrow as those that the program rounds to allow. ``strange``: elements that are finite on one side only.
    """

    error: float
    on: str = "dense PyTorch"
    tolerance: float = TOLERANCE
    strange: int = 0

    @property
    def ok(self) -> bool:
        return self.error < self.tolerance

    def __str__(self) -> str:
        if self.strange:
            return (
                f"values: {self.strange:,} elements are finite here and not in {self.on}, or the other way round. An "
                "operand holds infinities, or what is not a number: PyTorch multiplies them with zeros too, which are "
                "not stored here"
            )
        words = "within" if self.ok else "OUTSIDE"
        return f"values: largest error {self.error:.1e} of the largest value, {words} {self.tolerance:g} of {self.on}"


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """The largest difference as a share of the largest finite value (of 1 at least); infinite where one is infinite or
    not a number and the other is not. Large sparse tensors are compared by what either stores."""
    got, want = _alike(got, want)
    apart = ~((got == want) | (got.isnan() & want.isnan()))
    if not bool(apart.any()):
        return 0.0
    finite = want[want.isfinite()].abs()
    scale = max(1.0, float(finite.max())) if finite.numel() else 1.0
    worst = (got[apart] - want[apart]).abs().max()
    return float(worst) / scale if bool(worst.isfinite()) else float("inf")


def _strange(got: torch.Tensor, want: torch.Tensor) -> int:
    got, want = _alike(got, want)
    return int((got.isfinite() != want.isfinite()).sum())


def _alike(got: torch.Tensor, want: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both dense; where one is too large for that, both at the coordinates that either stores."""
    if got.numel() <= LARGEST or got.layout == want.layout == torch.strided:
        a, b = (x if x.layout == torch.strided else x.to_dense() for x in (got, want))
        return a, b.double()
    a, b = (x.to_sparse_coo().coalesce() for x in (got, want))
    places, where = torch.cat([a.indices(), b.indices()], 1).unique(dim=1, return_inverse=True)
    values = torch.zeros(2, places.shape[1], dtype=torch.float64)
    values[0, where[: a.values().numel()]] = a.values().double()
    values[1, where[a.values().numel() :]] = b.values().double()
    return values[0], values[1]


def compare(outputs: Sequence[torch.Tensor], expected: Sequence[torch.Tensor], bits: int = 53) -> Check:
    """What a run gave beside what PyTorch gives; ``bits``: significant ones of the narrowest floats in between."""
    pairs = list(zip(outputs, expected, strict=True))
    error = max((difference(a, b) for a, b in pairs), default=0.0)
    tolerance = max(TOLERANCE, 2.0 ** (4 - bits))
    return Check(error, tolerance=tolerance, strange=sum(_strange(a, b) for a, b in pairs) if error == math.inf else 0)


@dataclass(frozen=True)
class NarrowCheck:
    """``error`` of a run in a narrow type against float64, relative, and PyTorch's own in that type (``eager``)."""

    error: float
    eager: float
    dtype: torch.dtype
    on: str

    @property
    def ok(self) -> bool:
        return self.error <= oracle.tolerance(self.eager, self.dtype)

    def __str__(self) -> str:
        words = "within" if self.ok else "OVER"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"values: relative error {self.error:.1e} against float64, {words} twice {dtype}'s own of {self.eager:.1e}"
        )


def narrow(target: Target, outputs: Sequence[torch.Tensor], dtype: torch.dtype) -> NarrowCheck | None:
    """What a run in a narrower type gave (``outputs``, float64) beside PyTorch in float64, and PyTorch in that type
    beside the same; None where a dense run would be too large."""
    try:
        wanted, eager = target.reference(), target.reference(dtype)
    except SparseError:
        return None
    wanted, eager = ([x if x.layout == torch.strided else x.to_dense() for x in made] for made in (wanted, eager))
    ours, theirs = (
        max((oracle.error(x.double(), w) for x, w in zip(made, wanted, strict=True)), default=0.0)
        for made in (outputs, eager)
    )
    return NarrowCheck(ours, theirs, dtype, f"{target.oracle()} in float64")


def check(target: Target, made: Any, program: Program) -> Check | None:
    """What ``program`` gave of ``target`` (``made``, a ``ProgramResult`` or ``CpuResult``) beside PyTorch.

    Where a dense run would be too large, products are summed over coordinates instead, or an instance of its first rows
    and columns is run and compared; None if there is no such thing (a module, whose weights have sizes of their own).
    """
    try:
        return replace(compare(made.outputs, target.reference(), program.bits), on=target.oracle())
    except SparseError:
        smaller = target.smaller()
    if smaller is None:
        return None
    ran = smaller.make(program.schedule).run(*smaller.inputs)
    found = compare(ran.outputs, smaller.reference(), program.bits)
    return replace(found, on=f"dense PyTorch on {smaller.name}")
