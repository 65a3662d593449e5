"""Decoders over a static cache as transformers writes them, small: one token of one sequence a call."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn


class Norm(nn.Module):
    def __init__(self, width: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.rand(width) + 0.5), eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * wide.to(x.dtype)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    low, high = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
    return (x * cos) + (torch.cat((-high, low), dim=-1) * sin)


Held = tuple[Tensor, Tensor, Tensor]
"""A layer's cache: keys and values [1, key heads, positions, features], and how many tokens they hold."""


class Layer(nn.Module):
    def __init__(
        self, width: int, hidden: int, heads: int, key_heads: int, features: int, positions: int, norms: bool,
        act: Callable[[Tensor], Tensor], bias: bool,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.key_heads, self.features, self.act = heads, key_heads, features, act
        self.norm, self.middle_norm = Norm(width), Norm(width)
        self.query = nn.Linear(width, heads * features, bias=bias)
        self.key, self.value = (nn.Linear(width, key_heads * features, bias=False) for _ in range(2))
        self.output = nn.Linear(heads * features, width, bias=False)
        self.query_norm, self.key_norm = (Norm(features) if norms else nn.Identity() for _ in range(2))
        self.gate, self.up = (nn.Linear(width, hidden, bias=False) for _ in range(2))
        self.down = nn.Linear(hidden, width, bias=False)
        shape = (1, key_heads, positions, features)
        self.keys, self.values = nn.Buffer(torch.randn(shape)), nn.Buffer(torch.randn(shape))
        self.length = nn.Buffer(torch.tensor(0))

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, held: Held) -> Tensor:
        cache_keys, cache_values, length = held
        normed = self.norm(x)
        q = self.query_norm(self.query(normed).view(1, 1, -1, self.features)).transpose(1, 2)
        k = self.key_norm(self.key(normed).view(1, 1, -1, self.features)).transpose(1, 2)
        v = self.value(normed).view(1, 1, -1, self.features).transpose(1, 2)
        q, k = turned(q, cos, sin), turned(k, cos, sin)
        at = torch.arange(1, device=x.device) + length
        length.add_(1)
        cache_keys.index_copy_(2, at, k)
        cache_values.index_copy_(2, at, v)
        times = self.heads // self.key_heads
        keys, values = (c[:, :, None].expand(1, -1, times, -1, -1).flatten(1, 2) for c in (cache_keys, cache_values))
        y = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
        x = x + self.output(y.transpose(1, 2).reshape(1, 1, -1))
        normed = self.middle_norm(x)
        return x + self.down(self.act(self.gate(normed)) * self.up(normed))


class Decoder(nn.Module):
    """Logits [1, 1, vocabulary] of the next token [1, 1]; the caches are buffers, or what is given."""

    def __init__(
        self, layers: int = 2, width: int = 64, hidden: int = 96, heads: int = 4, key_heads: int = 2,
        features: int = 64, positions: int = 24, vocabulary: int = 40, norms: bool = False, bias: bool = False,
        act: Callable[[Tensor], Tensor] = nn.functional.silu,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, width), Norm(width)
        each = (width, hidden, heads, key_heads, features, positions, norms, act, bias)
        self.layers = nn.ModuleList(Layer(*each) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.features = features

    @property
    def held(self) -> list[Held]:
        """The buffers."""
        return [(layer.keys, layer.values, layer.length) for layer in self.layers]  # pyright: ignore

    def forward(self, ids: Tensor, caches: list[Held] | None = None) -> Tensor:
        caches = self.held if caches is None else caches
        x = self.embedding(ids)
        at = torch.arange(1, device=ids.device) + caches[0][2]
        frequency = 10000.0 ** -(torch.arange(0, self.features, 2, device=ids.device) / self.features)
        angle = torch.cat([at[:, None] * frequency] * 2, -1)[None]
        cos, sin = (f(angle).to(x.dtype).unsqueeze(1) for f in (torch.cos, torch.sin))
        mask = (torch.arange(caches[0][0].shape[2], device=ids.device) <= at)[None, None, None]
        for layer, held in zip(self.layers, caches, strict=True):
            x = layer(x, cos, sin, mask, held)
        return self.head(self.norm(x))
