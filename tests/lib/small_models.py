"""The five applications at sizes that the reference machine executes in seconds, with values that gradients feel."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tilestream.apps.models import find

SIZES: dict[str, dict[str, Any]] = {
    "nerf": {"rows": 100, "width": 32, "points": 15, "views": 9},
    "dlrm": {"batch": 48, "bottom": (64, 32, 16), "top": (64, 48, 1), "table_rows": (20,) * 5},
    "mgn": {"batch": 1, "nodes": 40, "edges": 90, "width": 32},
    "graphcast_cut": {"nodes": 40, "edges": 90, "width": 48, "node_features": 30, "outs": 21},
    "llama_prefill": {"batch": 2, "tokens": 24, "width": 64, "heads": 4, "kv_heads": 2, "hidden": 96},
}


@dataclass(frozen=True)
class Case:
    """A model on the CPU in bfloat16, its inputs, and in training the gradients of its outputs."""

    module: nn.Module
    inputs: tuple[Any, ...]
    tangents: tuple[Tensor, ...]

    def eager(self, wide: bool = False) -> tuple[tuple[Tensor, ...], Mapping[str | int, Tensor]]:
        """Outputs and gradients by place, as PyTorch makes them; ``wide``: of the same values in float64."""
        module = copy.deepcopy(self.module)
        inputs = [_copied(x) if isinstance(x, Tensor) else x for x in self.inputs]
        if wide:
            module = module.double()
            inputs = [_copied(x, torch.float64) if isinstance(x, Tensor) else x for x in self.inputs]
        outs = _flat(module(*inputs))
        if not self.tangents:
            return tuple(outs), {}
        torch.autograd.backward(outs, [t.to(o.dtype) for t, o in zip(self.tangents, outs, strict=True)])
        places: dict[str | int, Tensor] = dict(module.named_parameters())
        places |= {i: x for i, x in enumerate(inputs) if isinstance(x, Tensor)}
        return tuple(o.detach() for o in outs), {k: x.grad for k, x in places.items() if x.grad is not None}


def small(app: str, mode: str, seed: int = 0) -> Case:
    """A model with random weights, so that no gradient is zero by construction."""
    module, inputs = find(app).make(training=mode == "training", cut=True, device="cpu", **SIZES[app])
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            scale, offset = (p.shape[-1] ** -0.5, 0.0) if p.dim() > 1 else (0.3, 0.1)
            p.copy_(torch.randn(p.shape, generator=generator) * scale + offset)
        outs = _flat(module(*inputs))
    tangents = [torch.randn(o.shape, generator=generator).to(o.dtype) for o in outs] if mode == "training" else []
    return Case(module, inputs, tuple(tangents))


def _copied(x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    found = x.detach().to(dtype) if dtype is not None and x.is_floating_point() else x.detach().clone()
    return found.requires_grad_(x.requires_grad)


def _flat(outs: Tensor | Sequence[Tensor]) -> list[Tensor]:
    return [outs] if isinstance(outs, Tensor) else list(outs)
