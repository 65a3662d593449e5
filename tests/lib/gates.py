"""Operands of gates of squeeze and excite, and whether a result is right."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilestream.graph.squeeze import squeeze
from tilestream.kernels.operators.squeeze import Squeeze

Case = tuple[Squeeze, int, int]
"""A gate, pictures, and parts of each."""


def given(case: Case, device: str = "cpu") -> list[Any]:
    """What the operator takes; means are no small part of the sums."""
    shape, pictures, parts = case
    generator, dtype = torch.Generator().manual_seed(0), torch.bfloat16 if shape.dtype == "bf16" else torch.float16

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    c, h = shape.channels, shape.hidden
    layers = [normal(h, c, 1, 1) / c**0.5, normal(h), normal(c, h, 1, 1) / h**0.5, normal(c)]
    layers = [t.to(dtype).to(device) for t in layers]
    return [normal(pictures, parts, c).add(1).to(device), 1 / parts, *layers, shape.activation, shape.gate]


def is_right(got: Tensor, operands: list[Any]) -> bool:
    """Whether gates are what they are in float64, but for one rounding."""
    want = squeeze(*(t.double() if isinstance(t, Tensor) else t for t in operands))
    return bool(((got.double() - want).abs() <= torch.finfo(got.dtype).eps / 2 * want.abs() + 1e-5).all())
