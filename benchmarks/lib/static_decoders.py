"""Decoders over a static cache as transformers writes them, small: one token of each of some sequences a call.

What their layers consist of is a ``Form``: of Llama, Qwen2, GPT-2, Pythia, ...
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor, nn

from tilestream.kernels.step.form import LLAMA, Form

Act = Callable[[Tensor], Tensor]
ACTIVATIONS: dict[str, Act] = {
    "silu": nn.functional.silu,
    "gelu": nn.functional.gelu,
    "gelu_tanh": partial(nn.functional.gelu, approximate="tanh"),
    "relu": nn.functional.relu,
    "relu_squared": lambda x: torch.square(nn.functional.relu(x)),
}


class Norm(nn.Module):
    """RMSNorm; with ``plus`` by that much more than its weight, in fp32, as Gemma's."""

    def __init__(self, width: int, eps: float = 1e-6, plus: float = 0.0) -> None:
        super().__init__()
        self.weight, self.eps, self.plus = nn.Parameter(torch.rand(width) + 0.5 - plus), eps, plus

    def forward(self, x: Tensor) -> Tensor:
        wide = x.to(torch.float32)
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        if self.plus:
            return (wide * (self.plus + self.weight.float())).type_as(x)
        return self.weight * wide.to(x.dtype)


def norm_of(form: Form, width: int) -> nn.Module:
    if form.norm == "layer":
        made = nn.LayerNorm(width)
        nn.init.normal_(made.bias, std=0.1)
        return made
    return Norm(width, plus=float(form.norm == "rms_plus_one"))


class Turned(nn.Module):
    """A product with a bias, whose weight is [inputs, outputs], as GPT-2's."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(inputs, outputs) * inputs**-0.5)
        self.bias = nn.Parameter(torch.randn(outputs) * 0.1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


def turned(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The first features of heads, as many as there are cosines, rotated."""
    first, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    low, high = first[..., : first.shape[-1] // 2], first[..., first.shape[-1] // 2 :]
    made = (first * cos) + (torch.cat((-high, low), dim=-1) * sin)
    return made if not rest.shape[-1] else torch.cat([made, rest], dim=-1)


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
        self, width: int, hidden: int, heads: int, key_heads: int, features: int, positions: int, batch: int,
        form: Form, act: Act | None, times: float,
    ) -> None:  # fmt: skip
        super().__init__()
        self.heads, self.key_heads, self.features, self.form, self.times = heads, key_heads, features, form, times
        self.act = act or ACTIVATIONS[form.activation]

        def product(name: str, inputs: int, outputs: int) -> nn.Module:
            return Turned(inputs, outputs) if form.turned else nn.Linear(inputs, outputs, bias=name in form.biased)

        self.norm, self.middle_norm = norm_of(form, width), norm_of(form, width)
        if form.qkv:
            self.query_key_value = product("query", width, (heads + 2 * key_heads) * features)
        else:
            self.query = product("query", width, heads * features)
            self.key, self.value = (product("query", width, key_heads * features) for _ in range(2))
        self.output = product("output", heads * features, width)
        plain = norm_of(form if form.norm != "layer" else LLAMA, features)
        self.query_norm, self.key_norm = (plain if form.head_norms else nn.Identity() for _ in range(2))
        if form.gate_up:
            self.gate_up = product("gate", width, 2 * hidden)
        else:
            self.gate = product("gate", width, hidden)
            if form.gated:
                self.up = nn.Linear(width, hidden, bias=False)
        self.down = product("down", hidden, width)
        self.keys, self.values, self.length = held(batch, key_heads, positions, features)

    def projected(self, x: Tensor) -> tuple[Tensor, ...]:
        """Queries, keys and values [batch, heads, 1, features]."""
        sizes, each = [self.heads, self.key_heads, self.key_heads], (x.shape[0], 1, -1, self.features)
        if self.form.qkv == "heads":
            rows = self.query_key_value(x).view(x.shape[0], 1, self.key_heads, -1).transpose(1, 2)
            return rows.split(self.features, dim=-1)
        if self.form.qkv:
            parts = self.query_key_value(x).split([n * self.features for n in sizes], dim=2)
        else:
            parts = self.query(x), self.key(x), self.value(x)
        return tuple(part.view(each) for part in parts)

    def grown(self, x: Tensor) -> Tensor:
        if self.form.gate_up:
            gate, up = self.gate_up(x).chunk(2, dim=-1)
            return up * self.act(gate)
        return self.act(self.gate(x)) * self.up(x) if self.form.gated else self.act(self.gate(x))

    def forward(self, x: Tensor, cos: Tensor | None, sin: Tensor | None, mask: Tensor, held: Held) -> Tensor:
        q, k, v = self.projected(self.norm(x))
        q, k = self.query_norm(q), self.key_norm(k)
        if self.form.qkv != "heads":
            q, k, v = (n.transpose(1, 2) for n in (q, k, v))
        if cos is not None and sin is not None:
            q, k = turned(q, cos, sin), turned(k, cos, sin)
        y = self.output(attended(q, k, v, mask, held))
        if self.form.parallel:
            return self.down(self.grown(self.middle_norm(x))) + y + x
        x = x + (y if self.times == 1.0 else y * self.times)
        y = self.down(self.grown(self.middle_norm(x)))
        return x + (y if self.times == 1.0 else y * self.times)


def held_by(layers: nn.ModuleList) -> list[Held]:
    return [(layer.keys, layer.values, layer.length) for layer in layers]  # pyright: ignore


class Decoder(nn.Module):
    """Logits [batch, 1, vocabulary] of the next token [batch, 1]; the caches are buffers, or what is given.

    Args:
        act: another activation than the form's. times: what blocks are multiplied by.
    """

    def __init__(
        self, layers: int = 2, width: int = 64, hidden: int = 96, heads: int = 4, key_heads: int = 2,
        features: int = 64, positions: int = 24, vocabulary: int = 40, batch: int = 1, form: Form = LLAMA,
        act: Act | None = None, times: float = 1.0,
    ) -> None:  # fmt: skip
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, width), norm_of(form, width)
        self.rotary, self.no_rope = int(features * form.rotary), form.no_rope
        if not self.rotary:
            self.places = nn.Embedding(positions, width)
        each = (width, hidden, heads, key_heads, features, positions, batch, form, act, times)
        self.layers = nn.ModuleList(Layer(*each) for _ in range(layers))
        self.head = nn.Linear(width, vocabulary, bias="head" in form.biased)
        self.head.weight = self.embedding.weight

    @property
    def held(self) -> list[Held]:
        """The buffers."""
        return held_by(self.layers)

    def forward(self, ids: Tensor, caches: list[Held] | None = None) -> Tensor:
        caches = self.held if caches is None else caches
        x, cos, sin = self.embedding(ids), None, None
        at = torch.arange(1, device=ids.device) + caches[0][2]
        if self.rotary:
            frequency = 10000.0 ** -(torch.arange(0, self.rotary, 2, device=ids.device) / self.rotary)
            angle = torch.cat([at[:, None] * frequency] * 2, -1)[None]
            cos, sin = (f(angle).to(x.dtype).unsqueeze(1) for f in (torch.cos, torch.sin))
        else:
            x = x + self.places(at)
        mask = (torch.arange(caches[0][0].shape[2], device=ids.device) <= at)[None, None, None]
        for n, (layer, held) in enumerate(zip(self.layers, caches, strict=True)):
            x = layer(x, *((None, None) if n in self.no_rope else (cos, sin)), mask, held)
        return self.head(self.norm(x))
