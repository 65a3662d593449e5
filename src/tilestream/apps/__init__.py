"""Models with their published sizes, by name: what the command line calls ``nerf`` or ``chain``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tilestream.apps import edge_block
from tilestream.apps.chains import Chain
from tilestream.apps.nerf import NeRF, scene
from tilestream.apps.zoo import (
    ChannelMixer,
    Classifier,
    GatedFFN,
    PolicyValue,
    SignedDistance,
    Siren,
    TabularResNet,
    TwoTower,
    autoencoder,
    dlrm_bottom,
)


@dataclass(frozen=True)
class App:
    """A model with its usual number of rows.

    ``module`` makes it with its published sizes; ``inputs`` makes its inputs, fp32 [rows, features],
    from a row count. ``scaled`` draws weights after He et al. 2015, so that the signal stays of order
    one through the layers and an error anywhere shows in the result.
    """

    name: str
    module: Callable[[], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    rows: int
    doc: str
    scaled: bool = True

    def make(
        self, rows: int | None = None, dtype: torch.dtype = torch.bfloat16, device: str = "cpu", seed: int = 0
    ) -> tuple[nn.Module, tuple[Tensor, ...]]:
        """The module in evaluation mode and its inputs, both of ``dtype`` on ``device``; seeded, never zeros."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = self.module()
            if self.scaled:
                for layer in module.modules():
                    if isinstance(layer, nn.Linear):
                        nn.init.kaiming_uniform_(layer.weight, nonlinearity="relu")
            module = module.to(device, dtype).eval().requires_grad_(False)
            inputs = tuple(x.to(device, dtype) for x in self.inputs(self.rows if rows is None else rows))
        return module, inputs


def _normal(*features: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda rows: tuple(torch.randn(rows, n) for n in features)


def _uniform(features: int) -> Callable[[int], tuple[Tensor, ...]]:
    return lambda rows: (torch.rand(rows, features) * 2 - 1,)


APPS: dict[str, App] = {
    app.name: app
    for app in (
        App("nerf", NeRF, scene, 262144, "NeRF 8x256, skip, view branch, on rays of a made scene"),
        App("chain", Chain, _normal(256), 262144, "eight times linear + ReLU, 256 wide"),
        App(
            "meshgraphnets",
            edge_block.meshgraphnets,
            _normal(128, 128, 128),
            262144,
            "edge 384-128-128-128, LayerNorm, residual",
        ),
        App(
            "graphcast",
            edge_block.graphcast,
            _normal(512, 512, 512),
            327680,
            "edge 1536-512-512, SiLU, LayerNorm, residual",
        ),
        App("autoencoder", autoencoder, _normal(256), 131072, "256-128-64-32-64-128-256, ReLU"),
        App("siren", Siren, _uniform(2), 262144, "2-256-256-256-256-3, sin", scaled=False),
        App("sdf", SignedDistance, _uniform(3), 262144, "3-128-128-128-128-1, softplus"),
        App("policy_value", PolicyValue, _normal(376), 65536, "376-256-256, tanh, heads of 17 and 1"),
        App("gated_ffn", GatedFFN, _normal(256), 131072, "RMSNorm, gated 256-256-256, residual"),
        App("mixer", ChannelMixer, _normal(128), 131072, "LayerNorm, 128-512-128, GELU, residual"),
        App("tabular_resnet", TabularResNet, _normal(128), 131072, "two residual blocks 128-256-128, LayerNorm, head"),
        App("dlrm_bottom", dlrm_bottom, _normal(13), 65536, "13-512-256-128, ReLU"),
        App("two_tower", TwoTower, _normal(128, 128), 131072, "two towers 128-256-128-64 and a dot product"),
        App("classifier", Classifier, _normal(128), 131072, "128-256-256-10, softmax"),
    )
}
"""The first four are the cases of the papers; the others are the ten small models of the benchmarks."""

__all__ = ["APPS", "App"]
