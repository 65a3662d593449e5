"""MLP-Mixer's block and operands of its layers over tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilestream.kernels.operators.token_mixing import Mixing

BF16 = torch.bfloat16
EPS = 1e-6


class Mixer(nn.Module):
    """Layers over tokens and over channels, a LayerNorm in front of either and a residual around it."""

    def __init__(self, tokens: int = 36, wide: int = 64, hidden: int = 72, act: type[nn.Module] = nn.GELU) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(wide, eps=EPS) for _ in range(2))
        self.tokens = nn.Sequential(nn.Linear(tokens, hidden), act(), nn.Linear(hidden, tokens))
        self.channels = nn.Sequential(nn.Linear(wide, 2 * wide), act(), nn.Linear(2 * wide, wide))
        for norm in self.norms:
            nn.init.normal_(norm.weight)  # pyright: ignore[reportArgumentType]
            nn.init.normal_(norm.bias)  # pyright: ignore[reportArgumentType]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.tokens(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
        return x + self.channels(self.norms[1](x))


def given(mixing: Mixing, images: int, device: str = "cpu") -> list[Any]:
    """What the operator takes. Images have a mean that is no small part of them."""
    generator, dtype = torch.Generator().manual_seed(0), torch.bfloat16 if mixing.dtype == "bf16" else torch.float16

    def normal(*shape: int, over: int = 1, mean: float = 0.0) -> Tensor:
        return (torch.randn(shape, generator=generator) / over**0.5 + mean).to(dtype).to(device)

    t, h, c = mixing.tokens, mixing.hidden, mixing.channels
    x, residual = normal(images, t, c, mean=2.0), normal(images, t, c) if mixing.residual else None
    vectors = [normal(c), normal(c)] if mixing.normed else [None, None]
    layers = [normal(h, t, over=t), normal(h), normal(t, h, over=h), normal(t)]
    return [x, *vectors, EPS, *layers, mixing.activation, mixing.normed, residual]


def by_functional(operands: Sequence[Any]) -> Tensor:
    """The same in float64 by torch, in which nothing is rounded."""
    x, gamma, beta, w1, b1, w2, b2, residual = (
        None if operands[k] is None else operands[k].double() for k in (0, 1, 2, 4, 5, 6, 7, 10)
    )
    eps, activation, normed = operands[3], operands[8], operands[9]
    rows = functional.layer_norm(x, x.shape[2:], gamma, beta, eps) if normed else x
    hidden = functional.linear(rows.transpose(1, 2), w1, b1)
    tanh = activation == "gelu_tanh"
    hidden = functional.gelu(hidden, approximate="tanh") if tanh else getattr(functional, activation)(hidden)
    made = functional.linear(hidden, w2, b2).transpose(1, 2)
    return made if residual is None else made + residual


def is_right(got: Tensor, operands: Sequence[Any]) -> bool:
    """Whether a result is off by no more than a few roundings of what both products read."""
    want, unit = by_functional(operands), torch.finfo(got.dtype).eps
    off = (got.double() - want).abs()
    return bool((off <= unit * want.abs() + 4 * unit).all()) and float(off.norm() / want.norm()) < 0.6 * unit
