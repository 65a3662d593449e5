"""GPT-3 small (Brown et al. 2020, table 2.1: 12 decoders of 768, 12 heads of 64) with BigBird attention.

The mask is the paper's: blocks of rows and columns that are global, a window of three blocks, and two random blocks a
row (Zaheer et al. 2020, with the counts of FuseFlow's generator).
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

SEQUENCE, WIDTH, HEADS, INNER, DECODERS = 1024, 768, 12, 3072, 12
GLOBAL_BLOCKS, RANDOM_BLOCKS = 2, 2


def bigbird_blocks(sequence: int, block: int, seed: int = 0) -> np.ndarray:
    """bool [sequence / block, sequence / block]: which blocks the mask keeps. 549 of 4,096 at 1024 and 16."""
    n = sequence // block
    i, j = np.indices((n, n))
    kept = (i < GLOBAL_BLOCKS) | (j < GLOBAL_BLOCKS) | (abs(i - j) <= 1)
    random = np.random.RandomState(seed)  # the generator's own stream: the counts of kept blocks depend on it
    for row in range(n):
        kept[row, random.choice(n, min(RANDOM_BLOCKS, n), replace=False)] = True
    return kept


def bigbird_mask(sequence: int = SEQUENCE, block: int = 64, seed: int = 0) -> Tensor:
    """float64 [sequence, sequence] of zeros and ones: ``bigbird_blocks`` with each block filled."""
    kept = bigbird_blocks(sequence, block, seed)
    return torch.from_numpy(np.kron(kept, np.ones((block, block))))


class Attention(nn.Module):
    """One head over a mask: ``softmax(Q K^T / sqrt(d) where mask) V``, ``[n, d]`` each, mask ``[n, n]`` of 0 and 1.

    What the mask drops is absent, not zero: the softmax runs over what it keeps.
    """

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Tensor:
        scores = torch.matmul(q, k.transpose(-1, -2)) / math.sqrt(q.shape[-1])
        kept = scores.masked_fill(mask == 0, -math.inf)
        return torch.matmul(torch.softmax(kept, dim=-1), v)


class Projections(nn.Module):
    """Layer norm, then Q, K and V: ``[n, width]`` to three of ``[n, width]``. Their weights are dense."""

    def __init__(self, width: int = WIDTH, seed: int = 0) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=torch.float64)
        self.query = linear(width, width, seed)
        self.key = linear(width, width, seed + 1)
        self.value = linear(width, width, seed + 2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        h = self.norm(x)
        return self.query(h), self.key(h), self.value(h)


class Rest(nn.Module):
    """Output projection, residual, layer norm, feed-forward, residual: ``([n, width], [n, width])`` to ``[n, width]``.

    The arguments are what attention gave and what the decoder was given.
    """

    def __init__(self, width: int = WIDTH, inner: int = INNER, seed: int = 0) -> None:
        super().__init__()
        self.out = linear(width, width, seed + 3)
        self.norm = nn.LayerNorm(width, dtype=torch.float64)
        self.up = linear(width, inner, seed + 4)
        self.down = linear(inner, width, seed + 5)

    def forward(self, attended: Tensor, x: Tensor) -> Tensor:
        h = self.out(attended) + x
        return self.down(F.gelu(self.up(self.norm(h)))) + h


class Decoder(nn.Module):
    """One decoder: projections, ``heads`` of attention over ``mask``, and the rest. ``[n, width]`` to itself."""

    def __init__(self, width: int = WIDTH, heads: int = HEADS, inner: int = INNER, seed: int = 0) -> None:
        super().__init__()
        self.heads = heads
        self.projections = Projections(width, seed)
        self.attention = Attention()
        self.rest = Rest(width, inner, seed)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(0, 1) for t in self.projections(x))
        attended = self.attention(q, k, v, mask)
        return self.rest(attended.transpose(0, 1).flatten(1), x)


class GPT3(nn.Module):
    """``decoders`` decoders and a final layer norm, on embedded tokens: ``[n, width]`` to ``[n, width]``."""

    def __init__(
        self,
        width: int = WIDTH,
        heads: int = HEADS,
        inner: int = INNER,
        decoders: int = DECODERS,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.decoders = nn.ModuleList(Decoder(width, heads, inner, seed + 10 * i) for i in range(decoders))
        self.norm = nn.LayerNorm(width, dtype=torch.float64)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        for decoder in self.decoders:
            x = decoder(x, mask)
        return self.norm(x)


def linear(n: int, m: int, seed: int) -> nn.Linear:
    """A float64 linear layer whose weights come from ``seed``."""
    made = nn.Linear(n, m, dtype=torch.float64)
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        made.weight.copy_(torch.randn(m, n, generator=random, dtype=torch.float64) / math.sqrt(n))
        made.bias.copy_(torch.randn(m, generator=random, dtype=torch.float64) / 10)
    return made
