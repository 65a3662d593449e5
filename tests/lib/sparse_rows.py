"""Random modules of rows: sums of neighbours, masked attention, and what works on a row, in any order."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import torch
from sparse_modules import rand
from torch import Tensor, nn

Step = Callable[[Tensor, Tensor, Tensor], Tensor]
"""Of the adjacency, the features at hand, and those at the start."""


class Rows(nn.Module):
    """Steps one after the other: ``([n, n], [n, f])`` to ``[n, f]`` (or ``[n]``)."""

    def __init__(self, features: int, seed: int) -> None:
        super().__init__()
        self.bias, self.weight = rand(features, seed=seed), rand(features, features, seed=seed + 1) / features
        self.scale = rand(1, seed=seed + 2)
        chosen = random.Random(seed)
        self.names = [chosen.choice(list(self.steps())) for _ in range(chosen.randint(1, 5))]
        if not set(self.names) & {"neighbours", "senders", "attention"}:
            self.names.insert(chosen.randint(0, len(self.names)), chosen.choice(["neighbours", "senders", "attention"]))

    def steps(self) -> dict[str, Step]:
        return {
            "neighbours": lambda a, h, x: torch.matmul(a, h),
            "senders": lambda a, h, x: torch.matmul(a.t(), h),
            "attention": self.attention,
            "bias": lambda a, h, x: h + self.bias,
            "product": lambda a, h, x: torch.matmul(h, self.weight),
            "residual": lambda a, h, x: h + x,
            "less": lambda a, h, x: x - h,
            "relu": lambda a, h, x: torch.relu(h),
            "gelu": lambda a, h, x: nn.functional.gelu(h),
            "tanh": lambda a, h, x: torch.tanh(h) * 2,
            "gate": lambda a, h, x: torch.sigmoid(h) * h,
            "softmax": lambda a, h, x: torch.softmax(h, -1),
            "mean": lambda a, h, x: h - h.mean(-1, keepdim=True),
            "largest": lambda a, h, x: h - h.amax(-1, keepdim=True),
        }

    def attention(self, adjacency: Tensor, h: Tensor, x: Tensor) -> Tensor:
        scores = torch.matmul(h, x.t()) / math.sqrt(h.shape[-1])
        kept = scores.masked_fill(adjacency == 0, -math.inf)
        return torch.matmul(torch.softmax(kept, -1), x)

    def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
        h, steps = x, self.steps()
        for name in self.names:
            h = steps[name](adjacency, h, x)
        return h


def case(seed: int) -> tuple[Rows, Tensor, Tensor]:
    """A module, an adjacency (dense; a diagonal leaves no row empty) and features."""
    nodes, features = 5 + seed % 9, 1 + seed % 7
    adjacency = rand(nodes, nodes, density=(0.1, 0.3, 0.9)[seed % 3], seed=seed) + torch.eye(nodes, dtype=torch.float64)
    return Rows(features, seed), adjacency, rand(nodes, features, seed=seed + 3)
