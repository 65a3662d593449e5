"""Graph convolution (Kipf and Welling 2017) and GraphSAGE (Hamilton et al. 2017), two layers, as FuseFlow sizes them.

The adjacency matrix holds plain zeros and ones: the released experiments do not normalise it.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

HIDDEN = 16


class GCN(nn.Module):
    """``softmax(A relu(A X W1 + b1) W2 + b2)``: ``([n, n], [n, features])`` to ``[n, classes]``.

    Eight operators, which are the eight kernels of the released code: A X, W1, b1, relu, A H, W2, b2, softmax.
    Weights are ``density`` full: the released generator's default zeroes 60 %.
    """

    def __init__(
        self, features: int, hidden: int = HIDDEN, classes: int = 7, density: float = 0.4, seed: int = 0
    ) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)
        self.weight1 = nn.Parameter(sparse_weight(features, hidden, density, random))
        self.bias1 = nn.Parameter(torch.rand(hidden, generator=random, dtype=torch.float64))
        self.weight2 = nn.Parameter(sparse_weight(hidden, classes, density, random))
        self.bias2 = nn.Parameter(torch.rand(classes, generator=random, dtype=torch.float64))

    def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
        gathered = torch.matmul(adjacency, x)
        projected = torch.matmul(gathered, self.weight1)
        hidden = torch.relu(projected + self.bias1)
        gathered2 = torch.matmul(adjacency, hidden)
        projected2 = torch.matmul(gathered2, self.weight2)
        return torch.softmax(projected2 + self.bias2, dim=-1)


class GraphSAGE(nn.Module):
    """Two layers of ``relu(X Ws + bs + A X Wn + bn)``: ``([n, n], [n, features])`` to ``[n, classes]``."""

    def __init__(
        self, features: int, hidden: int = HIDDEN, classes: int = 7, density: float = 0.4, seed: int = 0
    ) -> None:
        super().__init__()
        random = torch.Generator().manual_seed(seed)

        def weight(n: int, m: int) -> nn.Parameter:
            return nn.Parameter(sparse_weight(n, m, density, random))

        def bias(m: int) -> nn.Parameter:
            return nn.Parameter(torch.rand(m, generator=random, dtype=torch.float64))

        self.weight_self1, self.bias_self1 = weight(features, hidden), bias(hidden)
        self.weight_near1, self.bias_near1 = weight(features, hidden), bias(hidden)
        self.weight_self2, self.bias_self2 = weight(hidden, classes), bias(classes)
        self.weight_near2, self.bias_near2 = weight(hidden, classes), bias(classes)

    def forward(self, adjacency: Tensor, x: Tensor) -> Tensor:
        own = torch.matmul(x, self.weight_self1) + self.bias_self1
        gathered = torch.matmul(adjacency, x)
        near = torch.matmul(gathered, self.weight_near1) + self.bias_near1
        hidden = torch.relu(own + near)
        own2 = torch.matmul(hidden, self.weight_self2) + self.bias_self2
        gathered2 = torch.matmul(adjacency, hidden)
        near2 = torch.matmul(gathered2, self.weight_near2) + self.bias_near2
        return torch.relu(own2 + near2)


def sparse_weight(rows: int, columns: int, density: float, random: torch.Generator) -> Tensor:
    """float64 [rows, columns] of values in [-1, 1), each kept with probability ``density``, never an exact zero."""
    values = torch.rand(rows, columns, generator=random, dtype=torch.float64) * 2 - 1
    values = torch.where(values == 0, torch.full_like(values, 0.5), values)
    keep = torch.rand(rows, columns, generator=random, dtype=torch.float64) < density
    return values * keep
