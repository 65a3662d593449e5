"""Depthwise convolutions on a GPU: our kernel beside a library's."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from tilestream.graph.convolutions import FIRST, LAST
from tilestream.graph.depthwise import DEPTHWISE, depthwise
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.plan.depthwise import Kind, tile_on
from tilestream.run.made_up import normals
from tilestream.run.target import Target
from tilestream.run.timer import Trial


def depthwise_trial(kind: Kind, target: Target) -> Trial:
    """Our kernel with what it takes in, and the library's convolution without: what Inductor makes of the rest comes on
    top of that. Held to PyTorch's operators."""
    conv, tile = kind.conv, tile_on(kind, target.hardware)
    slid = (conv.stride, list(conv.padding), conv.activation, [tile.rows, tile.columns], conv.pooled)

    def make() -> list[Any]:
        normal = normals(target.device, TORCH_DTYPES[conv.dtype])
        vectors = [normal(conv.channels, dtype=torch.float32) if conv.scaled else None for _ in range(2)]
        bias = normal(conv.channels) if kind.biased else None
        x = normal(kind.images, conv.height, conv.width, conv.channels)
        return [x, normal(conv.channels, conv.group, *conv.kernel) / (conv.kernel[0] * conv.group**0.5), bias, *vectors]

    def by(operator: Callable[..., list[Tensor]], *values: Any) -> list[Tensor]:
        return operator(*values, *slid)

    def library(x: Tensor, weight: Tensor, bias: Tensor | None, *_: Any) -> list[Tensor]:
        numbers = ([conv.stride] * 2, list(conv.padding), [1, 1], False, [0, 0], conv.channels // conv.group)
        return [torch.ops.aten.convolution(x.permute(FIRST), weight, bias, *numbers).permute(LAST)]

    return Trial.of_two("depthwise convolution", make, partial(by, DEPTHWISE), library, partial(by, depthwise))
