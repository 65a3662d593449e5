"""What an operator outside of every graph amounts to: FLOPs, bytes, a dtype."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import torch
from torch.utils._pytree import tree_leaves

from tilestream.graph.sizes import hint
from tilestream.ir.dtypes import DTYPES

aten = torch.ops.aten


@dataclass(frozen=True)
class Kernel:
    """``flops`` of products, in ``dtype`` (bf16, f16, f32, float64), and ``bytes`` between DRAM and the chip."""

    flops: float
    dtype: str
    bytes: float


def bytes_of(value: object) -> float:
    """Bytes of all tensors in ``value``, which may be fake and have symbolic sizes."""
    return float(
        sum(
            prod(hint(d) for d in x.shape) * x.element_size() for x in tree_leaves(value) if isinstance(x, torch.Tensor)
        )
    )


def dtype_of(value: object) -> str:
    """The dtype of the first floating-point tensor in ``value``: f32 where there is none, torch's name of others."""
    floating = (x.dtype for x in tree_leaves(value) if isinstance(x, torch.Tensor) and x.is_floating_point())
    dtype = next(floating, torch.float32)
    return DTYPES.get(dtype, str(dtype).removeprefix("torch."))
