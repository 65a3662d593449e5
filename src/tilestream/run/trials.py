"""Operators of ours on a GPU, beside what a library has instead, each held to the same by PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tilestream.graph.convolutions import FIRST, LAST
from tilestream.graph.depthwise import DEPTHWISE, depthwise
from tilestream.graph.squeeze import SQUEEZE, squeeze
from tilestream.graph.token_mixing import TOKEN_MIXING, token_mixing
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.plan.depthwise import Kind as DepthwiseKind
from tilestream.plan.depthwise import tile_on
from tilestream.plan.patches import Kind as PatchesKind
from tilestream.plan.squeeze import Kind as SqueezeKind
from tilestream.plan.token_mixing import Kind as MixingKind
from tilestream.run.made_up import normals
from tilestream.run.target import Target
from tilestream.run.timer import Trial


def patches_trial(kind: PatchesKind, target: Target) -> Trial:
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


def gate_trial(kind: SqueezeKind, target: Target) -> Trial:
    """Our kernel, and less than a library must do: the sum and both products. Held to PyTorch's operators."""
    shape, dtype = kind.shape, TORCH_DTYPES[kind.shape.dtype]

    def make() -> list[Any]:
        normal = normals(target.device, dtype)
        sizes = (shape.hidden, shape.channels), (shape.channels, shape.hidden)
        first, second = (normal(*layer, 1, 1) / layer[1] ** 0.5 for layer in sizes)
        sums = normal(kind.pictures, kind.parts, shape.channels, dtype=torch.float32)
        return [sums, 1 / kind.parts, first, normal(shape.hidden), second, normal(shape.channels)]

    def by(operator: Callable[..., Tensor], *values: Any) -> list[Tensor]:
        return [operator(*values, shape.activation, shape.gate)]

    def library(*values: Any) -> list[Tensor]:
        sums, _, first, _, second, _ = values
        return [torch.sum(sums, 1, dtype=dtype) @ first.flatten(1).t() @ second.flatten(1).t()]

    return Trial.of_two("squeeze", make, partial(by, SQUEEZE), library, partial(by, squeeze))


def depthwise_trial(kind: DepthwiseKind, target: Target) -> Trial:
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


EPS = 1e-6


def mixing_trial(kind: MixingKind, target: Target) -> Trial:
    """Our kernel, and less than a library and Inductor must do: the norm, and both products of what lies turned
    already. Held to PyTorch's operators."""
    m = kind.mixing

    def make() -> list[Any]:
        normal = normals(target.device, TORCH_DTYPES[m.dtype])
        vectors = [normal(m.channels) if m.normed else None for _ in range(2)]
        sizes = (m.hidden, m.tokens), (m.tokens, m.hidden)
        layers = [each for out, width in sizes for each in (normal(out, width) / width**0.5, normal(out))]
        images = [normal(kind.images, m.tokens, m.channels) for _ in range(1 + m.residual)]
        return [images[0], *vectors, *layers, images[1] if m.residual else None]

    def by(operator: Callable[..., Tensor], *values: Any) -> list[Tensor]:
        x, gamma, beta, *layers, residual = values
        return [operator(x, gamma, beta, EPS, *layers, m.activation, m.normed, residual)]

    def library(*values: Any) -> list[Tensor]:
        x, gamma, beta, w1, _, w2, *_ = values
        rows = functional.layer_norm(x, x.shape[2:], gamma, beta, EPS) if m.normed else x
        return [rows.view(-1, m.tokens) @ w1.t() @ w2.t()]

    return Trial.of_two("token mixing", make, partial(by, TOKEN_MIXING), library, partial(by, token_mixing))
