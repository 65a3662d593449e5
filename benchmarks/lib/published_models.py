"""Whole models of timm and transformers, at full depth and with random weights, by the names that ``docs/results.md``
has for them. Needs ``pip install 'tilestream[models]'``."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from benchmarks.lib.real_models import MODELS, Case, module

EDGE = 224
"""Pixels along an edge of an image."""
Made = tuple[nn.Module, tuple[Tensor, ...]]


def _timm(name: str, images: int, layout: torch.memory_format) -> Callable[[str], Made]:
    def make(device: str) -> Made:
        import timm  # pyright: ignore[reportMissingImports]

        model = timm.create_model(name).bfloat16().eval().requires_grad_(False)
        model = model.to(device, memory_format=layout)  # pyright: ignore[reportCallIssue]
        x = torch.randn(images, 3, EDGE, EDGE, device=device, dtype=torch.bfloat16)
        return model, (x.to(memory_format=layout),)

    return make


def _bert(device: str) -> Made:
    bert = MODELS["bert-base"]
    return module(bert, bert.depth, device=device), bert.inputs(Case(8, 128), device=device)


PUBLISHED: dict[str, Callable[[str], Made]] = {
    "bert": _bert,
    "vit_tiny": _timm("vit_tiny_patch16_224", 64, torch.contiguous_format),
    "swin_t": _timm("swin_tiny_patch4_window7_224", 16, torch.contiguous_format),
    "efficientnet_b0": _timm("efficientnet_b0", 64, torch.channels_last),
}
"""``make(device)``: a model in bf16, ready for inference, and its inputs."""
