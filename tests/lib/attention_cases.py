"""Operands of attention of few queries, and the judgement of its results."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tilestream.run import oracle

BF16, F16 = torch.bfloat16, torch.float16


def case(
    heads: int, queries: int, features: int, positions: int, dtype: torch.dtype = BF16, mask: str = ""
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    generator = torch.Generator().manual_seed(positions)
    q, k, v = (
        torch.randn(heads, 1, n, features, generator=generator).to(dtype) for n in (queries, positions, positions)
    )
    if not mask:
        return q, k, v, None
    added = torch.randn(1 if mask == "one" else heads, 1, 1, positions, generator=generator).to(dtype)
    if mask == "each":
        added[:, :, :, 5:] = float("-inf")
        added[0, :, :, 2] = torch.finfo(dtype).min
        added[1] = torch.finfo(dtype).min  # then all are as low, and count alike
    return q, k, v, added


def judged(got: Tensor, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> bool:
    """Whether a result is as near to float64 as PyTorch's own."""
    eager, exact = (
        F.scaled_dot_product_attention(*(None if t is None else t.to(dtype) for t in (q, k, v, mask)))  # pyright: ignore
        for dtype in (q.dtype, torch.float64)
    )
    return oracle.judge([got], [eager], [exact])[2]
