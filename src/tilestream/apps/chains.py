"""Chains of equal layers: the simplest case, and the one with the least room for anything but fusion."""

from __future__ import annotations

from torch import Tensor, nn


class Chain(nn.Module):
    """``layers`` times linear and ReLU, all ``width`` wide: [*, width] to [*, width]."""

    def __init__(self, layers: int = 8, width: int = 256, bias: bool = True) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for _ in range(layers):
            parts += [nn.Linear(width, width, bias=bias), nn.ReLU()]
        self.layers = nn.Sequential(*parts)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x)
