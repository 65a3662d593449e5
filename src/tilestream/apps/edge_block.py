"""Edge updates of message-passing simulators: an MLP on (edge, sender, receiver) with LayerNorm and a residual.

MeshGraphNets (Pfaff et al. 2021, appendix A.1): two hidden layers of 128, ReLU. GraphCast (Lam et
al. 2023, supplement 3.5): one hidden layer of 512, SiLU.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class EdgeBlock(nn.Module):
    """``e + LayerNorm(MLP(cat(e, a, b)))``; e, a, b and the result are [*, width].

    Args:
        width: features of an edge and of a node.
        hidden: how many hidden layers of ``width`` the MLP has.
        activation: between its layers, ``nn.ReLU`` or ``nn.SiLU``.
    """

    def __init__(self, width: int = 128, hidden: int = 2, activation: type[nn.Module] = nn.ReLU) -> None:
        super().__init__()
        parts: list[nn.Module] = []
        for layer in range(hidden):
            parts += [nn.Linear(3 * width if layer == 0 else width, width), activation()]
        self.mlp = nn.Sequential(*parts, nn.Linear(width, width), nn.LayerNorm(width))

    def forward(self, e: Tensor, a: Tensor, b: Tensor) -> Tensor:
        return e + self.mlp(torch.cat([e, a, b], -1))


def meshgraphnets() -> EdgeBlock:
    """384-128-128-128, ReLU."""
    return EdgeBlock(128, 2, nn.ReLU)


def graphcast() -> EdgeBlock:
    """1536-512-512, SiLU."""
    return EdgeBlock(512, 1, nn.SiLU)
