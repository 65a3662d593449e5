"""Llama 3 8B (Grattafiori et al. 2024): meta-llama/llama3, ``llama/model.py``.

Layers of the reference (``dim=4096, n_layers=32, n_heads=32, n_kv_heads=8, vocab_size=128256, rope_theta=500000``),
none with a bias:

- embedding 128256 x 4096;
- 32 layers: RMSNorm; queries 4096-4096, keys and values 4096-1024, rotary embedding, attention of 32 heads of 128 on 8
  of keys and values, output 4096-4096, residual; RMSNorm; gate and up 4096-14336, ``silu(gate) * up``, down 14336-4096,
  residual;
- RMSNorm, output 4096-128256.

Attention is written out (scores in memory) or one call of ``scaled_dot_product_attention``. RMSNorm is computed in the
model's dtype, not in fp32 as the reference does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Sizes:
    """``tokens`` new ones follow ``context`` that a cache holds: prefill has no context, decoding one token.

    ``layers_only`` leaves out the embedding and the output layer: the inputs are then hidden states, as in the middle
    of the model, and take gradients. Heads have ``width / heads`` features unless ``head_features`` says how many, and
    with ``head_norms`` those of queries and keys are normalised before they are turned, as in Qwen3.
    """

    batch: int = 1
    tokens: int = 1024
    context: int = 0
    layers: int = 32
    width: int = 4096
    heads: int = 32
    kv_heads: int = 8
    hidden: int = 14336
    vocabulary: int = 128256
    theta: float = 500000.0
    sdpa: bool = False
    layers_only: bool = False
    head_features: int = 0
    head_norms: bool = False

    @property
    def features(self) -> int:
        """Of a head."""
        return self.head_features or self.width // self.heads


class RMSNorm(nn.Module):
    """``x / sqrt(mean(x^2) + eps) * weight`` over the last dimension, written out as in the reference."""

    def __init__(self, width: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * self.weight


def rotations(positions: int, features: int, theta: float) -> Tensor:
    """Angles of the rotary embedding, as complex numbers of length one: complex64 [positions, features / 2]."""
    speed = theta ** (-torch.arange(0, features, 2).float() / features)
    angles = torch.outer(torch.arange(positions).float(), speed)
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, turn: Tensor) -> Tensor:
    """Turn pairs of features of [B, T, heads, features] by ``turn`` [T, features / 2]."""
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * turn[:, None]).flatten(3).type_as(x)


class Attention(nn.Module):
    """Grouped-query attention over the cache and the new tokens: [B, T, width] to [B, T, width].

    With caches of keys and values, each [B, kv_heads, context + T, features], the new ones go to their ends.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, self.features, self.sdpa = sizes.width, sizes.features, sizes.sdpa
        self.heads, self.kv_heads = sizes.heads, sizes.kv_heads
        self.q = nn.Linear(width, self.heads * self.features, bias=False)
        self.k = nn.Linear(width, self.kv_heads * self.features, bias=False)
        self.v = nn.Linear(width, self.kv_heads * self.features, bias=False)
        self.o = nn.Linear(self.heads * self.features, width, bias=False)
        self.q_norm = RMSNorm(self.features) if sizes.head_norms else nn.Identity()
        self.k_norm = RMSNorm(self.features) if sizes.head_norms else nn.Identity()

    def forward(self, x: Tensor, turn: Tensor, mask: Tensor, caches: Sequence[Tensor]) -> Tensor:
        batch, tokens, _ = x.shape
        q = rotate(self.q_norm(self.q(x).view(batch, tokens, self.heads, self.features)), turn).transpose(1, 2)
        k = rotate(self.k_norm(self.k(x).view(batch, tokens, self.kv_heads, self.features)), turn).transpose(1, 2)
        v = self.v(x).view(batch, tokens, self.kv_heads, self.features).transpose(1, 2)
        if caches:
            for cache, new in zip(caches, (k, v), strict=True):
                cache[:, :, cache.shape[2] - tokens :] = new
            k, v = caches
        k, v = self.repeated(k), self.repeated(v)
        if self.sdpa:
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = q @ k.transpose(2, 3) * self.features**-0.5
            out = torch.softmax(scores + mask, -1) @ v
        return self.o(out.transpose(1, 2).reshape(batch, tokens, -1))

    def repeated(self, x: Tensor) -> Tensor:
        """Each head of keys or values as often as queries share it."""
        batch, heads, tokens, features = x.shape
        return x[:, :, None].expand(-1, -1, self.heads // heads, -1, -1).reshape(batch, self.heads, tokens, features)


class FeedForward(nn.Module):
    """``down(silu(gate(x)) * up(x))``: [B, T, width] to [B, T, width]."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class Layer(nn.Module):
    """Attention and feed-forward, each behind an RMSNorm and with a residual: [B, T, width]."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = RMSNorm(sizes.width), RMSNorm(sizes.width)
        self.attention = Attention(sizes)
        self.ffn = FeedForward(sizes.width, sizes.hidden)

    def forward(self, x: Tensor, turn: Tensor, mask: Tensor, caches: Sequence[Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), turn, mask, caches)
        return x + self.ffn(self.ffn_norm(x))


class Llama(nn.Module):
    """``(tokens int64 [B, T] or states [B, T, width], rotations, mask [T, S], keys, values of each layer ...)``.

    Gives logits [B, T, vocabulary], or states [B, T, width] with ``layers_only``. Rotations and mask are inputs
    because the reference makes them once, not in every call.
    """

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        s = sizes
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.embed = None if s.layers_only else nn.Embedding(s.vocabulary, s.width)
        self.norm = None if s.layers_only else RMSNorm(s.width)
        self.output = None if s.layers_only else nn.Linear(s.width, s.vocabulary, bias=False)

    def forward(self, x: Tensor, turn: Tensor, mask: Tensor, *caches: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for index, layer in enumerate(self.layers):
            x = layer(x, turn, mask, caches[2 * index : 2 * index + 2])
        return x if self.norm is None or self.output is None else self.output(self.norm(x))


def module(sizes: Sizes) -> Llama:
    return Llama(sizes)


def inputs(sizes: Sizes) -> tuple[Tensor, ...]:
    """Tokens or states, rotations of the new positions, the causal mask, and the caches where there is a context."""
    s = sizes
    total, features = s.context + s.tokens, s.features
    x = torch.randn(s.batch, s.tokens, s.width) if s.layers_only else torch.randint(s.vocabulary, (s.batch, s.tokens))
    turn = rotations(total, features, s.theta)[s.context :].clone()
    mask = torch.full((s.tokens, total), float("-inf")).triu(s.context + 1)
    caches = [torch.randn(s.batch, s.kv_heads, total, features) for _ in range(2 * s.layers if s.context else 0)]
    return x, turn, mask, *caches
