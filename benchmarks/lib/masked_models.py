"""Attention over some of all pairs, and experts: what a mask, a window, sequences' lengths and a router leave.

The attention is ``flex_attention`` with a block mask, as PyTorch's users write it; eager is the same with a dense mask
through ``scaled_dot_product_attention``. Experts are ``grouped_mm`` over tokens sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention

from tilestream.apps.sparse.gpt3 import HEADS, SEQUENCE, WIDTH, bigbird_blocks

BLOCK = 64
"""Of BigBird's mask, as in the paper that the sizes are from."""
BATCH = 16


class Masked(nn.Module):
    """Attention [batch, heads, tokens, features] over the pairs of a block mask."""

    def __init__(self, mask: Any, dense: Tensor) -> None:
        super().__init__()
        self.mask, self.dense = mask, dense

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        made = flex_attention(q, k, v, block_mask=self.mask)
        assert isinstance(made, Tensor)
        return made


class Dense(nn.Module):
    """The same by a mask of all pairs, bool [tokens, tokens]."""

    def __init__(self, dense: Tensor) -> None:
        super().__init__()
        self.dense = dense

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.dense)


class Experts(nn.Module):
    """A router's best ``top`` of ``experts`` networks in - inner - in for each token, weighted and added up."""

    def __init__(self, experts: int, width: int, inner: int, top: int) -> None:
        super().__init__()
        self.experts, self.top = experts, top
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, inner) * width**-0.5)
        self.down = nn.Parameter(torch.randn(experts, inner, width) * inner**-0.5)

    def chosen(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Each token's experts, best first, and their shares: [tokens, top] both."""
        shares, chosen = torch.softmax(self.router(x).float(), dim=-1).topk(self.top, dim=-1)
        return chosen, shares

    def forward(self, x: Tensor) -> Tensor:
        chosen, shares = self.chosen(x)
        expert, order = torch.sort(chosen.flatten(), stable=True)
        counts = torch.zeros(self.experts, dtype=torch.int32, device=x.device)
        counts = counts.scatter_add(0, expert, torch.ones_like(expert, dtype=torch.int32))
        ends = counts.cumsum(0, dtype=torch.int32)
        token = order // self.top
        hidden = F.silu(F.grouped_mm(x[token], self.up, offs=ends))
        made = F.grouped_mm(hidden, self.down, offs=ends)
        share = shares.flatten()[order].to(x.dtype)
        return torch.zeros_like(x).index_add(0, token, made * share[:, None])


class Loop(nn.Module):
    """``Experts`` of any dtype, an expert at a time: for its values in float64."""

    def __init__(self, of: Experts) -> None:
        super().__init__()
        self.of = of

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        """``chosen`` int64 [tokens, top]: by the router in its own dtype, since close scores change the choice."""
        net, made = self.of, torch.zeros_like(x)
        shares = torch.softmax(net.router(x), dim=-1).gather(1, chosen)
        for expert in range(net.experts):
            token, slot = (chosen == expert).nonzero(as_tuple=True)
            hidden = F.silu(x[token] @ net.up[expert]) @ net.down[expert]
            made = made.index_add(0, token, hidden * shares[token, slot, None])
        return made


@dataclass(frozen=True)
class AttentionCase:
    """Sizes, and which pairs a mask keeps: a function of batch, head, query and key for ``create_block_mask``."""

    name: str
    batch: int
    heads: int
    tokens: int
    features: int
    keeps: Callable[[str, int], Callable[..., Tensor]]

    def problem(self, device: str = "cuda", tiny: bool = False) -> tuple[Masked, tuple[Tensor, ...]]:
        tokens, batch = (256, 1) if tiny else (self.tokens, self.batch)
        keeps = self.keeps(device, tokens)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            shape = (3, batch, self.heads, tokens, self.features)
            q, k, v = torch.randn(shape, device=device).bfloat16()
        mask = create_block_mask(keeps, None, None, tokens, tokens, device=device)
        at = torch.arange(tokens, device=device)
        zero = torch.zeros((), dtype=torch.int64, device=device)
        return Masked(mask, keeps(zero, zero, at[:, None], at[None, :])), (q, k, v)


def _bigbird(device: str, tokens: int) -> Callable[..., Tensor]:
    kept = torch.from_numpy(bigbird_blocks(tokens, BLOCK)).to(device)

    def keeps(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return kept[query // BLOCK, key // BLOCK]

    return keeps


def _window(device: str, tokens: int) -> Callable[..., Tensor]:
    def keeps(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (query - key < 512)

    return keeps


def _packed(device: str, tokens: int) -> Callable[..., Tensor]:
    """Documents of 40 to some thousand tokens behind each other, causal each."""
    random = torch.Generator().manual_seed(0)
    lengths = (torch.randn(tokens, generator=random) * 1.2 + 5.5).exp().long().clamp(min=40)
    document = torch.arange(len(lengths)).repeat_interleave(lengths)[:tokens].to(device)

    def keeps(b: Tensor, h: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (document[query] == document[key]) & (query >= key)

    return keeps


ATTENTION = {
    c.name: c
    for c in (
        AttentionCase("bigbird", BATCH, HEADS, SEQUENCE, WIDTH // HEADS, _bigbird),
        AttentionCase("window", 2, 16, 8192, 64, _window),
        AttentionCase("packed", 1, 16, 16384, 128, _packed),
    )
}
EXPERTS = {"experts": 64, "width": 1024, "inner": 512, "top": 2}
TOKENS = 4096


def experts(device: str = "cuda", tiny: bool = False) -> tuple[Experts, tuple[Tensor, ...]]:
    """64 of 1024-512-1024, two a token, 4,096 tokens, bf16."""
    sizes = {"experts": 4, "width": 64, "inner": 32, "top": 2} if tiny else EXPERTS
    with torch.random.fork_rng(), torch.device(device):
        torch.manual_seed(0)
        return Experts(**sizes).bfloat16().eval(), (torch.randn(64 if tiny else TOKENS, sizes["width"]).bfloat16(),)
