"""Attention over the pairs of a mask: operands, masks as instructions and as tensors, and the judgement of results."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask

from tilestream.cuda.masked_attention import Blocks
from tilestream.graph.masked.op import kept_pairs
from tilestream.kernels.parts.pairs import DENSE, EVERY, LOAD, PairMask, band
from tilestream.run import oracle

BF16, F16 = torch.bfloat16, torch.float16

WINDOW = PairMask((("ge", "q", "k"), ("sub", "q", "k"), ("lt", "v1", 100), ("bitwise_and", "v0", "v2")))
PACKED = PairMask(((LOAD, 0, "q"), (LOAD, 0, "k"), ("eq", "v0", "v1"), ("ge", "q", "k"), ("bitwise_and", "v2", "v3")))
BIGBIRD = PairMask((("floor_divide", "q", 64), ("floor_divide", "k", 64), (LOAD, 0, "v0", "v1")))
LENGTHS = PairMask(((LOAD, 0, "b"), ("lt", "k", "v0")))


@dataclass(frozen=True)
class Case:
    """``sizes``: batch, heads, heads of keys, queries, keys, features. ``differs``: masks for batches and heads."""

    mask: PairMask
    sizes: tuple[int, int, int, int, int, int]
    read: tuple[Tensor, ...] = ()
    differs: tuple[int, int] = (1, 1)
    dtype: torch.dtype = BF16
    by_token: bool = False
    listed: bool = True

    def operands(self, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
        batch, heads, key_heads, queries, keys, features = self.sizes
        random = torch.Generator().manual_seed(keys)
        made = []
        for h, n in ((heads, queries), (key_heads, keys), (key_heads, keys)):
            shape = (batch, n, h, features) if self.by_token else (batch, h, n, features)
            x = torch.randn(shape, generator=random).to(self.dtype).to(device)
            made.append(x.transpose(1, 2) if self.by_token else x)
        return made[0], made[1], made[2]

    @property
    def shape(self) -> tuple[int, int, int, int]:
        return (*self.differs, self.sizes[3], self.sizes[4])

    def kept(self) -> Tensor:
        """bool [batches, heads, queries, keys]."""
        return kept_pairs(self.mask, self.read, self.shape, torch.device("cpu"))

    def blocks(self, device: str = "cpu") -> Blocks | None:
        """As PyTorch lists them; None where every pair is looked at."""
        if not self.listed:
            return None
        made = self.block_mask(device)
        assert made.full_kv_num_blocks is not None and made.full_kv_indices is not None
        rows, keys = made.BLOCK_SIZE
        some = made.kv_num_blocks, made.kv_indices
        return Blocks(some, (made.full_kv_num_blocks, made.full_kv_indices), rows, keys)

    def block_mask(self, device: str) -> BlockMask:
        kept = self.kept().to(device)
        batches, heads = (None if n == 1 else n for n in self.differs)
        keeps = lambda b, h, q, k: kept[b % kept.shape[0], h % kept.shape[1], q, k]  # noqa: E731
        return create_block_mask(keeps, batches, heads, *self.shape[2:], device=device)


def _bigbird(blocks: int) -> Tensor:
    at = torch.arange(blocks)
    near = (at[:, None] - at).abs() <= 1
    return near | (at == 0) | (at == 0)[:, None]


def _holes() -> Tensor:
    """Whole tiles without a pair, whole tiles of all pairs, and rows that keep none."""
    kept = torch.rand(2, 1, 200, 300, generator=torch.Generator().manual_seed(0)) < 0.3
    kept[:, :, 64:, :100] = kept[:, :, 130:, 200:] = False
    kept[0, :, 5] = kept[0, :, 70:100] = False
    kept[1, :, :64, 64:128] = True
    return kept


CASES = {
    "a window": Case(WINDOW, (1, 2, 2, 300, 300, 64)),
    "packed sequences of 128, f16": Case(
        PACKED, (1, 1, 1, 257, 257, 128), (torch.arange(257).div(60, rounding_mode="floor"),), dtype=F16
    ),
    "bigbird, tokens before heads": Case(BIGBIRD, (2, 1, 1, 320, 320, 64), (_bigbird(5),), by_token=True),
    "lengths, grouped queries of 80": Case(
        LENGTHS, (2, 4, 2, 70, 200, 80), (torch.tensor([0, 130]),), (2, 1), listed=False
    ),
    "holes": Case(DENSE, (2, 2, 1, 200, 300, 32), (_holes(),), (2, 1), listed=False),
}

BANDS = {
    "causal, tokens before heads, grouped queries": Case(
        band(EVERY, 0), (2, 4, 2, 300, 300, 64), by_token=True, listed=False
    ),
    "all keys, queries of 80": Case(band(EVERY, EVERY), (1, 2, 2, 70, 201, 80), listed=False),
    "a window behind, f16": Case(band(99, 0), (1, 2, 2, 330, 330, 128), dtype=F16, listed=False),
    "a window around": Case(band(20, 70), (1, 1, 1, 257, 257, 32), listed=False),
    "keys that end before a window": Case(band(10, 10), (1, 1, 1, 200, 130, 16), listed=False),
}
"""Which no list is made of: a query's place says what it keeps."""


def judged(got: Tensor, case: Case) -> bool:
    """Whether a result is as near to float64 as PyTorch's own."""
    kept = case.kept()
    eager, exact = (
        F.scaled_dot_product_attention(
            *(t.to(dtype) for t in case.operands()), attn_mask=kept, enable_gqa=case.sizes[1] != case.sizes[2]
        )
        for dtype in (case.dtype, torch.float64)
    )
    return oracle.judge([got.cpu()], [eager], [exact])[2]
