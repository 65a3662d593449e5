"""Attention whose queries share keys, as models write it, and its operands."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

BATCH, HEADS, GROUPS, POSITIONS, FEATURES = 2, 6, 2, 32, 16


def repeated(x: Tensor, heads: int = HEADS) -> Tensor:
    batch, groups, *rest = x.shape
    return x[:, :, None].expand(-1, -1, heads // groups, -1, -1).reshape(batch, heads, *rest)


def attended(query: Tensor, key: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query, repeated(key), repeated(values), attn_mask=mask).transpose(1, 2)


def operands(tokens: int = 1, positions: int = POSITIONS) -> tuple[Tensor, Tensor, Tensor]:
    keys = (torch.randn(BATCH, GROUPS, positions, FEATURES) for _ in range(2))
    return (torch.randn(BATCH, tokens, HEADS, FEATURES).transpose(1, 2), *keys)  # pyright: ignore[reportReturnType]
