"""Ten small models of other kinds, for benchmarks: what people run by the million rows."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn import functional as F


def mlp(sizes: Sequence[int], activation: type[nn.Module] = nn.ReLU, last: bool = False) -> nn.Sequential:
    """Linear layers of ``sizes`` with ``activation`` between them, and after the last one if ``last``."""
    parts: list[nn.Module] = []
    for index, (n_in, n_out) in enumerate(zip(sizes, sizes[1:], strict=False)):
        parts.append(nn.Linear(n_in, n_out))
        if last or index < len(sizes) - 2:
            parts.append(activation())
    return nn.Sequential(*parts)


def autoencoder(features: int = 256, code: int = 32) -> nn.Sequential:
    """Anomaly detection on feature vectors: 256-128-64-32-64-128-256, ReLU."""
    return mlp([features, features // 2, features // 4, code, features // 4, features // 2, features])


class Siren(nn.Module):
    """Sitzmann et al. 2020: 2-256-256-256-256-3 with ``sin(30 x)``, an image as a function. [*, 2] to [*, 3]."""

    def __init__(self, ins: int = 2, width: int = 256, layers: int = 4, outs: int = 3, omega: float = 30.0) -> None:
        super().__init__()
        self.omega = omega
        sizes = [ins] + [width] * layers
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))
        self.last = nn.Linear(width, outs)
        with torch.no_grad():
            for index, layer in enumerate(self.hidden):
                assert isinstance(layer, nn.Linear)
                bound = 1 / ins if index == 0 else (6 / width) ** 0.5 / omega
                layer.weight.uniform_(-bound, bound)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.hidden:
            x = torch.sin(self.omega * layer(x))
        return self.last(x)


class SignedDistance(nn.Module):
    """A small distance field with softplus(beta=100), as in IGR and NeuS: 3-128-128-128-128-1. [*, 3] to [*, 1]."""

    def __init__(self, width: int = 128, layers: int = 4, beta: float = 100.0) -> None:
        super().__init__()
        self.beta = beta
        sizes = [3] + [width] * layers
        self.hidden = nn.ModuleList(nn.Linear(a, b) for a, b in zip(sizes, sizes[1:], strict=False))
        self.last = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.hidden:
            x = F.softplus(layer(x), beta=self.beta)
        return self.last(x)


class PolicyValue(nn.Module):
    """An actor-critic for a humanoid: 376-256-256, tanh, two heads. [*, 376] to ([*, 17], [*, 1])."""

    def __init__(self, observations: int = 376, width: int = 256, actions: int = 17) -> None:
        super().__init__()
        self.trunk = mlp([observations, width, width], nn.Tanh, last=True)
        self.policy = nn.Linear(width, actions)
        self.value = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.trunk(x)
        return torch.tanh(self.policy(h)), self.value(h)


class GatedFFN(nn.Module):
    """A gated feed-forward block with RMSNorm and a residual: ``x + down(silu(gate(n)) up(n))``. [*, width]."""

    def __init__(self, width: int = 256, hidden: int = 256) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width, eps=1e-6)
        self.gate = nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


class ChannelMixer(nn.Module):
    """The channel MLP of MLP-Mixer, 128-512-128, GELU, LayerNorm before, residual. [*, width]."""

    def __init__(self, width: int = 128, hidden: int = 512) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, hidden)
        self.down = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class TabularResNet(nn.Module):
    """Gorishniy et al. 2021 with LayerNorm: ``blocks`` residual blocks of 128-256-128, a head. [*, 128] to [*, 1]."""

    def __init__(self, width: int = 128, hidden: int = 256, blocks: int = 2) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, hidden), nn.ReLU(), nn.Linear(hidden, width))
            for _ in range(blocks)
        )
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 1)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(F.relu(self.norm(x)))


def dlrm_bottom() -> nn.Sequential:
    """The dense side of DLRM (MLPerf): 13-512-256-128, ReLU after each."""
    return mlp([13, 512, 256, 128], last=True)


class TwoTower(nn.Module):
    """A retrieval model's score: the dot product of two towers 128-256-128-64. Two [*, 128] to [*, 1]."""

    def __init__(self, features: int = 128, width: int = 256, code: int = 64) -> None:
        super().__init__()
        self.user = mlp([features, width, width // 2, code])
        self.item = mlp([features, width, width // 2, code])

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return (self.user(user) * self.item(item)).sum(-1, keepdim=True)


class Classifier(nn.Module):
    """128-256-256-10 with probabilities. [*, 128] to [*, 10]."""

    def __init__(self, features: int = 128, width: int = 256, classes: int = 10) -> None:
        super().__init__()
        self.net = mlp([features, width, width, classes])

    def forward(self, x: Tensor) -> Tensor:
        return F.softmax(self.net(x), -1)
