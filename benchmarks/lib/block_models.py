"""Blocks, decoders' parts, BERT and ResNet-50 in plain torch, as ``decoders.py`` times them: random weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class RMSNorm(nn.Module):
    """As Hugging Face's models have it: in fp32, rounded, then weighted."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * wide.to(x.dtype)


@dataclass(frozen=True)
class Sizes:
    """``act``: silu is gated, as in Llama; gelu and gelu_tanh are plain and have biases. ``post``: the norm is behind
    the residual, as in BERT."""

    width: int
    hidden: int
    act: str = "silu"
    post: bool = False

    @property
    def weight_bytes(self) -> int:
        return 2 * self.width * self.hidden * (3 if self.act == "silu" else 2)


BLOCKS = {
    "qwen3-0.6b": Sizes(1024, 3072),
    "llama-3.2-1b": Sizes(2048, 8192),
    "gpt2": Sizes(768, 3072, "gelu_tanh"),
    "bert-base": Sizes(768, 3072, "gelu", post=True),
}
TINY = {name: Sizes(48, 520, s.act, s.post) for name, s in BLOCKS.items()}
"""The same for a CPU; hidden layers are too wide for a row stream, as those are."""


class Block(nn.Module):
    """``x + FFN(norm(x))``, or ``norm(x + FFN(x))``: [rows, width] to [rows, width]."""

    def __init__(self, s: Sizes) -> None:
        super().__init__()
        gated = s.act == "silu"
        self.sizes = s
        self.norm = RMSNorm(s.width) if gated else nn.LayerNorm(s.width)
        self.up, self.down = nn.Linear(s.width, s.hidden, not gated), nn.Linear(s.hidden, s.width, not gated)
        self.gate = nn.Linear(s.width, s.hidden, bias=False) if gated else None

    def ffn(self, x: Tensor) -> Tensor:
        if self.gate is not None:
            return self.down(F.silu(self.gate(x)) * self.up(x))
        return self.down(F.gelu(self.up(x), approximate="tanh" if self.sizes.act == "gelu_tanh" else "none"))

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(x + self.ffn(x)) if self.sizes.post else x + self.ffn(self.norm(x))


class Repeated(nn.Module):
    """A block several times over weights of its own, one call behind the other."""

    def __init__(self, sizes: Sizes, calls: int) -> None:
        super().__init__()
        self.calls = calls
        self.blocks = nn.ModuleList(Block(sizes) for _ in range(calls))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def exact(self, x: Tensor) -> Tensor:
        """In float64."""
        x = x.double()
        for block in self.blocks:
            x = block.double()(x)
            block.bfloat16()
        return x


class Bert(nn.Module):
    """Layers of BERT on hidden states [B, T, width]: attention of heads of 64 features or fewer, then ``Block``."""

    def __init__(self, layers: int, sizes: Sizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(BertLayer(sizes) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


class BertLayer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width = sizes.width
        self.features = 64 if width % 64 == 0 else 8
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.norm, self.block = nn.LayerNorm(width), Block(sizes)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (-1, self.features)).transpose(1, 2) for part in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        return self.block(self.norm(x + self.o(mixed)))


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions, each with a batch norm, and what went in, under a ReLU (He et al. 2016)."""

    def __init__(self, ins: int, mid: int, stride: int) -> None:
        super().__init__()
        outs = 4 * mid
        self.conv1, self.bn1 = nn.Conv2d(ins, mid, 1, bias=False), nn.BatchNorm2d(mid)
        self.conv2, self.bn2 = nn.Conv2d(mid, mid, 3, stride, 1, bias=False), nn.BatchNorm2d(mid)
        self.conv3, self.bn3 = nn.Conv2d(mid, outs, 1, bias=False), nn.BatchNorm2d(outs)
        self.down = None
        if stride > 1 or ins != outs:
            self.down = nn.Sequential(nn.Conv2d(ins, outs, 1, stride, bias=False), nn.BatchNorm2d(outs))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn1(self.conv1(x)).relu()
        y = self.bn2(self.conv2(y)).relu()
        return (self.bn3(self.conv3(y)) + (x if self.down is None else self.down(x))).relu()


class ResNet(nn.Module):
    """ResNet-50 where ``counts`` are 3, 4, 6, 3 and ``width`` is 64: images [B, 3, H, W] to [B, 1000]."""

    def __init__(self, counts: tuple[int, ...] = (3, 4, 6, 3), width: int = 64) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width), nn.ReLU())
        blocks: list[nn.Module] = []
        ins = width
        for stage, count in enumerate(counts):
            for index in range(count):
                mid = width << stage
                blocks.append(Bottleneck(ins, mid, 2 if stage and not index else 1))
                ins = 4 * mid
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(ins, 1000)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.stem(x), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))
