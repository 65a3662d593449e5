"""A recurrent decoder of pure torch, one token of one sequence a call: RWKV-4's layers, whose states are buffers.

After Peng et al., "RWKV: Reinventing RNNs for the Transformer Era", 2023, section 3 and appendix on the exponentials'
running maximum.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


def wide(x: Tensor) -> Tensor:
    """In fp32; fp64 of fp64."""
    return x if x.dtype == torch.float64 else x.float()


class TimeMixing(nn.Module):
    """Receptance, key and value, each of its own mix of this token and the one before; a decaying sum of values."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.mixes = nn.ParameterList(nn.Parameter(torch.rand(width)) for _ in range(3))
        self.decay, self.first = nn.Parameter(torch.randn(width)), nn.Parameter(torch.randn(width))
        self.receptance, self.key, self.value = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.output = nn.Linear(width, width, bias=False)
        self.before = nn.Buffer(torch.zeros(1, width))
        self.sums = nn.Buffer(torch.cat([torch.zeros(2, width), torch.full((1, width), -1e30)]))

    def forward(self, x: Tensor) -> Tensor:
        r, k, v = (x * m + self.before * (1 - m) for m in self.mixes)
        self.before.copy_(x)
        r, k, v = torch.sigmoid(self.receptance(r)), wide(self.key(k)), wide(self.value(v))
        values, weights, most = wide(self.sums).unbind()
        here = torch.maximum(most, self.first + k)
        old, new = torch.exp(most - here), torch.exp(self.first + k - here)
        mean = (old * values + new * v) / (old * weights + new)
        decayed = most - torch.exp(self.decay)
        kept = torch.maximum(decayed, k)
        old, new = torch.exp(decayed - kept), torch.exp(k - kept)
        self.sums.copy_(torch.cat([old * values + new * v, old * weights + new, kept]))
        return self.output(r * mean.to(x.dtype))


class ChannelMixing(nn.Module):
    """A squared ReLU between two products, and a gate of a third."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.mixes = nn.ParameterList(nn.Parameter(torch.rand(width)) for _ in range(2))
        self.receptance = nn.Linear(width, width, bias=False)
        self.key, self.value = nn.Linear(width, hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.before = nn.Buffer(torch.zeros(1, width))

    def forward(self, x: Tensor) -> Tensor:
        k, r = (x * m + self.before * (1 - m) for m in self.mixes)
        self.before.copy_(x)
        return torch.sigmoid(self.receptance(r)) * self.value(torch.relu(self.key(k)).square())


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.time_norm, self.channel_norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.time, self.channel = TimeMixing(width), ChannelMixing(width, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.time(self.time_norm(x))
        return x + self.channel(self.channel_norm(x))


class RecurrentDecoder(nn.Module):
    """Logits [1, vocabulary] of the next token [1]; RWKV-4 169M as it comes. All states are of the weights' dtype."""

    def __init__(self, layers: int = 12, width: int = 768, hidden: int = 3072, vocabulary: int = 50277) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(vocabulary, width), nn.LayerNorm(width)
        self.blocks = nn.Sequential(*(Block(width, hidden) for _ in range(layers)))
        self.last, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.last(self.blocks(self.norm(self.embedding(ids)))))
