"""Convolutions of patches on a GPU: layers over rows beside cuDNN."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tilestream.graph.convolutions import FIRST
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.plan.patches import Kind
from tilestream.run.made_up import normals
from tilestream.run.target import Target
from tilestream.run.timer import Trial


def patches_trial(kind: Kind, target: Target) -> Trial:
    """The copy and the library's product, and cuDNN's convolution. Held to the same in float64."""
    p = kind.patches

    def make() -> list[Any]:
        normal, lying = normals(target.device, TORCH_DTYPES[p.dtype]), (torch.contiguous_format, torch.channels_last)
        (down, across), (ky, kx) = p.grid, p.kernel
        x = normal(kind.images, p.channels, down * ky, across * kx).to(memory_format=lying[p.last[0]])
        weight = normal(p.out, p.channels, ky, kx).to(memory_format=lying[p.last[1]]) / p.features**0.5
        return [x, weight, normal(p.out) if p.biased else None]

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        return [torch.nn.functional.linear(p.rows(x), p.matrix(weight), bias).permute(FIRST)]

    def library(x: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        return [torch.nn.functional.conv2d(x, weight, bias, p.kernel)]

    return Trial.of_two("patches", make, layer, library, layer)
