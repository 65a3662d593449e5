"""Operators of ours on a GPU, beside what a library has instead, each held to the same by PyTorch's operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_flatten, tree_unflatten

from tilestream.graph.convolutions import FIRST, LAST
from tilestream.graph.depthwise import DEPTHWISE, depthwise
from tilestream.graph.interaction import INTERACTION, INTERACTION_BACKWARD
from tilestream.graph.interaction.op import interaction, interaction_backward, multiplied, picked, stacked
from tilestream.graph.squeeze import SQUEEZE, squeeze
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.plan.depthwise import Kind as DepthwiseKind
from tilestream.plan.depthwise import tile_on
from tilestream.plan.interaction import Kind, Sizes
from tilestream.plan.patches import Kind as PatchesKind
from tilestream.plan.squeeze import Kind as SqueezeKind
from tilestream.run import fallback
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


MOST_TABLES = 4 << 30
"""Bytes of tables that are made up: many times the L2, so that larger ones would take no longer."""


@dataclass(frozen=True)
class Operands:
    """Tensors like those of a site, made up."""

    sources: list[Tensor]
    indices: list[Tensor | None]
    first: Tensor
    second: Tensor
    given: Tensor
    head: int

    @property
    def ours(self) -> tuple[list[Tensor], list[Tensor | None], Tensor, Tensor]:
        return self.sources, self.indices, self.first, self.second


def interaction_trial(kind: Kind, target: Target) -> Trial:
    """One call of ours and of the library's, forward, or forward and backward; held to PyTorch's operators."""
    sizes, training = kind.sizes, kind.training

    def make() -> list[Any]:
        made = operands(sizes, kind.tables, getattr(torch, kind.dtype.removeprefix("torch.")), target.device)
        return [*made.ours, made.given]

    def call(candidate: Candidate, values: Sequence[Any]) -> Callable[[], Sequence[Tensor]]:
        made = Operands(*values, head=sizes.head)
        if candidate.strategy == FALLBACK:
            passes = [library_forward(made, training), *([library_backward(made)] if training else [])]
            return lambda: [result for run in passes for result in run()]
        return lambda: _passes(INTERACTION, INTERACTION_BACKWARD, made, training)

    def plain(*values: Any) -> list[Tensor]:
        return _passes(interaction, interaction_backward, Operands(*values, head=sizes.head), training)

    return Trial("interaction", make, call, plain)


def _passes(
    forward: Callable[..., Tensor], backward: Callable[..., Tensor], made: Operands, training: bool
) -> list[Tensor]:
    results = [forward(*made.ours, made.head)]
    return [*results, backward(*made.ours, made.given)] if training else results


def operands(sizes: Sizes, tables: Sequence[int], dtype: torch.dtype, device: torch.device) -> Operands:
    """Random rows, and indices all over the tables; pairs are those of a lower triangle, again and again."""
    generator = torch.Generator(device).manual_seed(0)
    most = max(1, MOST_TABLES // (len(tables) * sizes.features * sizes.element))
    rows = [min(n, most) or sizes.batch for n in tables]

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, generator=generator, dtype=dtype)

    sources = [normal(n, sizes.features) for n in rows]
    indices = [
        torch.randint(n, (sizes.batch,), device=device, generator=generator) if table else None
        for n, table in zip(rows, tables, strict=True)
    ]
    triangle = torch.tril_indices(sizes.vectors, sizes.vectors, -1, device=device)
    named = torch.arange(sizes.pairs, device=device) % triangle.shape[1]
    return Operands(
        sources, indices, triangle[0, named], triangle[1, named], normal(sizes.batch, sizes.pairs), sizes.head
    )


# -- the library's way


def library_forward(made: Operands, training: bool) -> Callable[[], Sequence[Tensor]]:
    """Lookups, products and the selection by Inductor; ``training``: the rows are saved, too."""

    def run(sources: list[Tensor], indices: list[Tensor | None], first: Tensor, second: Tensor) -> list[Tensor]:
        rows = stacked(sources, indices)
        result = picked(rows, first, second, made.head, pad=False)
        return [result, rows] if training else [result]

    return _compiled(run, *made.ours)


def library_backward(made: Operands) -> Callable[[], Sequence[Tensor]]:
    """Gradients of the rows from rows that were saved, by Inductor."""
    rows = stacked(made.sources, made.indices)
    return _compiled(lambda *values: [multiplied(*values)], rows, made.first, made.second, made.given)


def _compiled(run: Callable[..., list[Tensor]], *operands: Any) -> Callable[[], Sequence[Tensor]]:
    """``run`` on tensors, and lists of tensors or None."""
    leaves, layout = tree_flatten(operands)
    values, mode = [x for x in leaves if x is not None], FakeTensorMode()

    def flat(*tensors: Tensor) -> list[Tensor]:
        left = iter(tensors)
        return run(*tree_unflatten([None if x is None else next(left) for x in leaves], layout))

    with mode:
        graph = make_fx(flat, tracing_mode="real")(*[mode.from_tensor(v) for v in values])
    call = fallback.rest(graph)
    return lambda: call(values)
