"""Decoders over a static cache as transformers writes them, small: one token of each of some sequences a call."""

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
"""A layer's cache: keys and values [batch, key heads, positions, features], and how many tokens they hold."""


def held(batch: int, key_heads: int, positions: int, features: int) -> Held:
    """As buffers."""
    shape = (batch, key_heads, positions, features)
    return nn.Buffer(torch.randn(shape)), nn.Buffer(torch.randn(shape)), nn.Buffer(torch.tensor(0))


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor, held: Held) -> Tensor:
    """Attention [batch, 1, heads times features] of a token whose key and value the cache gets."""
    cache_keys, cache_values, length = held
    at = torch.arange(1, device=q.device) + length
    length.add_(1)
    cache_keys.index_copy_(2, at, k)
    cache_values.index_copy_(2, at, v)
    batch, times = q.shape[0], q.shape[1] // k.shape[1]
    keys, values = cache_keys, cache_values
    if times > 1:
        keys, values = (c[:, :, None].expand(batch, -1, times, -1, -1).flatten(1, 2) for c in held[:2])
    y = nn.functional.scaled_dot_product_attention(q, keys, values, attn_mask=mask)
    return y.transpose(1, 2).reshape(batch, 1, -1)


class Layer(nn.Module):
    def __init__(
        self, width: int, hidden: int, heads: int, key_heads: int, features: int, positions: int, norms: bool,
        act: Callable[[Tensor], Tensor], bias: bool, batch: int,
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
        self.keys, self.values, self.length = held(batch, key_heads, positions, features)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Tensor, held: Held) -> Tensor:
        normed, each = self.norm(x), (x.shape[0], 1, -1, self.features)
        q = self.query_norm(self.query(normed).view(each)).transpose(1, 2)
        k = self.key_norm(self.key(normed).view(each)).transpose(1, 2)
        v = self.value(normed).view(each).transpose(1, 2)
        x = x + self.output(attended(turned(q, cos, sin), turned(k, cos, sin), v, mask, held))
        normed = self.middle_norm(x)
        return x + self.down(self.act(self.gate(normed)) * self.up(normed))


def held_by(layers: nn.ModuleList) -> list[Held]:
    return [(layer.keys, layer.values, layer.length) for layer in layers]  # pyright: ignore


class Decoder(nn.Module):
    """Logits [batch, 1, vocabulary] of the next token [batch, 1]; the caches are buffers, or what is given."""

    def __init__(
        self, layers: int = 2, width: int = 64, hidden: int = 96, heads: int = 4, key_heads: int = 2,
        features: int = 64, positions: int = 24, vocabulary: int = 40, norms: bool = False, bias: bool = False,
        act: Callable[[Tensor], Tensor] = nn.functional.silu, batch: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, width), Norm(width)
        each = (width, hidden, heads, key_heads, features, positions, norms, act, bias, batch)
        self.layers = nn.ModuleList(Layer(*each) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight
        self.features = features

    @property
    def held(self) -> list[Held]:
        """The buffers."""
        return held_by(self.layers)

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


class Turned(nn.Module):
    """A product with a bias, whose weight is [inputs, outputs], as GPT-2's."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight, self.bias = (
            nn.Parameter(torch.randn(inputs, outputs) * inputs**-0.5),
            nn.Parameter(torch.zeros(outputs)),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


class Gpt2Layer(nn.Module):
    def __init__(self, width: int, hidden: int, heads: int, positions: int, batch: int) -> None:
        super().__init__()
        self.width, self.features = width, width // heads
        self.norm, self.middle_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.project, self.output = Turned(width, 3 * width), Turned(width, width)
        self.grow, self.down = Turned(width, hidden), Turned(hidden, width)
        self.keys, self.values, self.length = held(batch, heads, positions, self.features)

    def forward(self, x: Tensor, mask: Tensor, held: Held) -> Tensor:
        parts = self.project(self.norm(x)).split(self.width, dim=2)
        q, k, v = (part.view(x.shape[0], 1, -1, self.features).transpose(1, 2) for part in parts)
        x = x + self.output(attended(q, k, v, mask, held))
        return x + self.down(nn.functional.gelu(self.grow(self.middle_norm(x)), approximate="tanh"))


class Gpt2Decoder(nn.Module):
    """As ``Decoder``, of GPT-2: LayerNorms, biases, positions that are learned."""

    def __init__(
        self, layers: int = 2, width: int = 128, hidden: int = 96, heads: int = 2, positions: int = 24,
        vocabulary: int = 40, batch: int = 1,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding, self.places = nn.Embedding(vocabulary, width), nn.Embedding(positions, width)
        self.layers = nn.ModuleList(Gpt2Layer(width, hidden, heads, positions, batch) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor) -> Tensor:
        caches = held_by(self.layers)
        at = torch.arange(1, device=ids.device) + caches[0][2]
        mask = (torch.arange(caches[0][0].shape[2], device=ids.device) <= at)[None, None, None]
        x = self.embedding(ids) + self.places(at)
        for layer, held in zip(self.layers, caches, strict=True):
            x = layer(x, mask, held)
        return self.head(self.norm(x))
