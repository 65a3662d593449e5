"""Blocks of vision models around depthwise convolutions, and pictures and weights of such a convolution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilestream.cuda.depthwise import call
from tilestream.cuda.host.build import HostRun
from tilestream.cuda.host.lanes import on_lanes
from tilestream.graph.depthwise import depthwise

Case = tuple[tuple[int, int, int, int], tuple[int, int], int, tuple[int, int], str, tuple[int, int], torch.dtype]
"""[images, height, width, channels], window, stride, padding, activation, tile, dtype."""
BF16, F16 = torch.bfloat16, torch.float16


class Inverted(nn.Module):
    """EfficientNet's block: 1 x 1, depthwise, squeeze and excite, 1 x 1; a batch norm behind each, and a residual."""

    def __init__(self, wide: int = 16, kernel: int = 3, stride: int = 1, act: type[nn.Module] = nn.SiLU) -> None:
        super().__init__()
        inner, self.kept = 2 * wide, stride == 1
        self.one = nn.Sequential(nn.Conv2d(wide, inner, 1, bias=False), nn.BatchNorm2d(inner), act())
        by_channel = nn.Conv2d(inner, inner, kernel, stride, kernel // 2, groups=inner, bias=False)
        self.two = nn.Sequential(by_channel, nn.BatchNorm2d(inner), act())
        self.down, self.up = nn.Conv2d(inner, 8, 1), nn.Conv2d(8, inner, 1)
        self.three = nn.Sequential(nn.Conv2d(inner, wide, 1, bias=False), nn.BatchNorm2d(wide))

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.one(x))
        gate = torch.sigmoid(self.up(torch.relu(self.down(y.mean((2, 3), keepdim=True)))))
        y = self.three(y * gate)
        return x + y if self.kept else y


class Grouped(nn.Module):
    """RegNetY's block: 1 x 1, 3 x 3 in groups, squeeze and excite, 1 x 1; a batch norm behind each, and a residual."""

    def __init__(self, wide: int = 48, group: int = 24, stride: int = 1) -> None:
        super().__init__()
        self.one = nn.Sequential(nn.Conv2d(wide, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.ReLU())
        in_groups = nn.Conv2d(wide, wide, 3, stride, 1, groups=wide // group, bias=False)
        self.two = nn.Sequential(in_groups, nn.BatchNorm2d(wide), nn.ReLU())
        self.down, self.up = nn.Conv2d(wide, 8, 1), nn.Conv2d(8, wide, 1)
        self.three = nn.Sequential(nn.Conv2d(wide, wide, 1, bias=False), nn.BatchNorm2d(wide))
        self.kept = stride == 1

    def forward(self, x: Tensor) -> Tensor:
        y = self.two(self.one(x))
        gate = torch.sigmoid(self.up(torch.relu(self.down(y.mean((2, 3), keepdim=True)))))
        y = self.three(y * gate)
        return torch.relu(x + y if self.kept else y)


class Next(nn.Module):
    """ConvNeXt's block: depthwise 7 x 7, LayerNorm, feed-forward layers, a scale of each channel, a residual."""

    def __init__(self, wide: int = 32) -> None:
        super().__init__()
        self.conv = nn.Conv2d(wide, wide, 7, padding=3, groups=wide)
        self.norm = nn.LayerNorm(wide)
        self.mlp = nn.Sequential(nn.Linear(wide, 4 * wide), nn.GELU(), nn.Linear(4 * wide, wide))
        self.gamma = nn.Parameter(torch.rand(wide))

    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(self.norm(self.conv(x).permute(0, 2, 3, 1))).permute(0, 3, 1, 2)
        return x + y.mul(self.gamma.reshape(1, -1, 1, 1))


def ready(*blocks: nn.Module) -> nn.Module:
    """The blocks one after another: bf16, channels last, in evaluation, with statistics that are no identity."""
    model = nn.Sequential(*blocks)
    for norm in model.modules():
        if isinstance(norm, nn.BatchNorm2d):
            nn.init.normal_(norm.running_mean, 0.0, 0.1)
            nn.init.uniform_(norm.running_var, 0.5, 2.0)
    return model.to(BF16).to(memory_format=torch.channels_last).eval()


def given(case: Case, device: str = "cpu", group: int = 1) -> list[Tensor]:
    """x, weight, bias, scale and shift; of groups of so many channels."""
    shape, window, *_, dtype = case
    generator, channels = torch.Generator().manual_seed(0), shape[3]

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=generator)

    weight = normal(channels, group, *window) / (window[0] * group**0.5)
    made = [normal(*shape).to(dtype), weight.to(dtype), normal(channels).to(dtype), normal(channels), normal(channels)]
    return [t.to(device) for t in made]


def is_right(got: Sequence[Tensor], case: Case, operands: Sequence[Tensor]) -> bool:
    """Whether a convolution and the sums of its tiles are what they are in float64, but for one rounding."""
    _, window, stride, padding, activation, tile, dtype = case
    x, weight, *vectors = (t.double() for t in operands)
    want = depthwise(x, weight, *vectors, stride, padding, activation, tile, True)  # pyright: ignore[reportCallIssue]
    unit = torch.finfo(dtype).eps
    near = (got[0].double() - want[0]).abs() <= unit * want[0].abs() + 2e-5 + 1e-3 * unit * window[0]
    sums = torch.allclose(got[1].double(), want[1], rtol=1e-4, atol=1e-3)
    return bool(near.all()) and sums


def by_functional(x: Tensor, weight: Tensor, bias: Tensor, stride: int, padding: Sequence[int]) -> Tensor:
    """The convolution by torch, channels last."""
    made = functional.conv2d(x.permute(0, 3, 1, 2), weight, bias, stride, tuple(padding), groups=x.shape[3])
    return made.permute(0, 2, 3, 1)


def on_host(case: Case, operands: Sequence[Tensor], options: HostRun | None = None) -> list[Tensor]:
    _, _, stride, padding, activation, tile, _ = case
    x, weight, *vectors = operands
    slid = (stride, padding, activation, tile, True)
    return on_lanes(lambda address: call((x, weight, *vectors, *slid), 2, address), options=options)
