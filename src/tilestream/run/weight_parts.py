"""The bf16 parts of float32 weights, side by side, as products by parts read them (``ir.float32``)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilestream.ir.float32 import LARGEST, PAIRS


def weight_parts(weights: Sequence[Tensor]) -> list[Tensor]:
    """Of each float32 weight [out, in], in any strides, its parts as bf16 [out, 6 in]: those of ``PAIRS`` in order.

    On a GPU all are made by one kernel.
    """
    if weights and weights[0].is_cuda:
        from tilestream.cuda import weight_parts as kernel

        return kernel.made(weights)
    return [_by_torch(w) for w in weights]


def _by_torch(weight: Tensor) -> Tensor:
    rest, parts = weight, []
    for _ in range(2):
        parts.append(rest.clamp(-LARGEST, LARGEST).to(torch.bfloat16))
        rest = rest - parts[-1].float()
    parts.append(rest.to(torch.bfloat16))
    return torch.cat([parts[of_weight] for _, of_weight in PAIRS], 1)
