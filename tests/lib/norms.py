"""Operands of gradients of norms, and whether results are right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tilestream.graph.rewrites.norm_sums import norm_gradients


@dataclass(frozen=True)
class Case:
    """So many rows; ``parts``: partial sums."""

    rows: int
    columns: int
    parts: int = 1
    centred: bool = True
    weighted: bool = True
    beside: bool = False
    dtype: torch.dtype = torch.bfloat16


CASES = {
    "two of three lanes": Case(40, 96, parts=2),
    "three vectors": Case(17, 192, parts=3, beside=True),
    "no weight": Case(9, 256, weighted=False),
    "f16": Case(33, 384, beside=True, dtype=torch.float16),
    "few lanes of the last turn": Case(10, 130),
    "root mean squares": Case(19, 768, centred=False, parts=2),
    "the widest": Case(12, 1024, beside=True),
    "more CTAs than rows": Case(3, 192, parts=4, beside=True),
}


def given(case: Case, device: str = "cpu") -> list[Any]:
    """What the operator takes: rows off the middle, so that means count."""
    generator = torch.Generator().manual_seed(case.rows)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator).to(case.dtype).to(device)

    shape = case.rows, case.columns
    weight = normal(case.columns) if case.weighted else None
    beside = normal(*shape) if case.beside else None
    return [normal(*shape), normal(*shape) * 2 + 0.5, weight, 1e-5, case.centred, beside, case.parts]


def is_right(got: Sequence[Tensor], operands: list[Any]) -> bool:
    """Whether rows are what they are in float64 but for one rounding, and sums but for those of float32."""
    rows, sums = norm_gradients(*(t.double() if isinstance(t, Tensor) else t for t in operands))
    near = (got[0].double() - rows).abs() <= torch.finfo(got[0].dtype).eps / 2 * rows.abs() + 2e-5
    totals, wanted = got[1].double().sum(0), sums.sum(0)
    bound = 1e-6 * operands[0].double().abs().sum(0) * 8 + 1e-5
    return bool(near.all()) and bool(((totals - wanted).abs() <= bound).all())
