"""Small residual networks of bottlenecks, channels last, with norms whose statistics are no identity."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Bottleneck(nn.Module):
    """ResNet's block: 1 x 1, 3 x 3, 1 x 1, each with a batch norm, and a residual."""

    def __init__(self, wide: int = 32, narrow: int = 16, stride: int = 1, out: int = 0) -> None:
        super().__init__()
        last = out or wide
        self.one = nn.Sequential(nn.Conv2d(wide, narrow, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU())
        self.two = nn.Sequential(nn.Conv2d(narrow, narrow, 3, stride, 1, bias=False), nn.BatchNorm2d(narrow), nn.ReLU())
        self.three = nn.Sequential(nn.Conv2d(narrow, last, 1, bias=False), nn.BatchNorm2d(last))
        self.beside = nn.Sequential(nn.Conv2d(wide, last, 1, stride, bias=False), nn.BatchNorm2d(last)) if out else None

    def forward(self, x: Tensor) -> Tensor:
        kept = x if self.beside is None else self.beside(x)
        return torch.relu(self.three(self.two(self.one(x))) + kept)


def small_resnet() -> nn.Module:
    """Two blocks, of which the second halves the picture; bf16, in evaluation."""
    torch.manual_seed(0)
    model = nn.Sequential(
        Bottleneck(), Bottleneck(stride=2, out=48), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(48, 10)
    )
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean, 0.0, 0.1)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return model.bfloat16().to(memory_format=torch.channels_last).eval()


def images(channels: int = 0, size: int = 8, count: int = 2) -> Tensor:
    """Channels last; by default those of ``small_resnet``, of 10 x 8 pixels."""
    shape = (count, channels or 32, size + 2 * (not channels), size)
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    return x.bfloat16().to(memory_format=torch.channels_last)
