"""Depthwise convolutions, and gates of squeeze and excite behind them, as kernels of ours: which are, by measurement
where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tilestream.announce import announced
from tilestream.graph.convolutions import FIRST, LAST
from tilestream.graph.depthwise import DEPTHWISE, depthwise
from tilestream.graph.own import on_gpu
from tilestream.graph.squeeze import SQUEEZE
from tilestream.graph.squeeze import squeeze as squeezed
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.kernels.operators.depthwise import kernel
from tilestream.options import Options
from tilestream.plan import squeeze
from tilestream.plan.candidates import FALLBACK, Candidate, Plan
from tilestream.plan.depthwise import Kind, kind_of, question, sites, take, tile_on
from tilestream.run import prepare
from tilestream.run.target import Target
from tilestream.run.timer import Trial


def take_depthwise(owner: fx.GraphModule, options: Options, target: Target) -> list[Plan]:
    """Have the depthwise convolutions of an inference graph that win by it become our operator; the choices for these.

    An exception of ours costs the convolution, and is announced.

    Raises:
        TilestreamError: with ``fallback=False``.
    """
    taken: list[Plan] = []
    found = sites(owner.graph, options)
    _build_ahead([kind_of(site) for site in found], options, target)
    for site in found:
        with announced("a depthwise convolution goes to Inductor", options.fallback):
            made = choice(kind_of(site), options, target)
            if not made.wins:
                continue
            take(site, target.hardware)
            taken.append(made)
            gates = [gate_choice(kind, options, target) for kind in squeeze.kinds_of(site, target.hardware)]
            if gates and all(gate.wins for gate in gates):
                take(site, target.hardware, squeezed=True)
                taken += gates
    return taken


def choice(kind: Kind, options: Options, target: Target) -> Plan:
    """Ours or the library's: timed once, predicted where nothing is timed."""
    asked = question(kind, target.hardware, target.kind == "reference")
    return prepare.chosen(asked, lambda: depthwise_trial(kind, target), options, target)


def gate_choice(kind: squeeze.Kind, options: Options, target: Target) -> Plan:
    """Gates as one kernel of ours, or the library's sum and products: as ``choice``."""
    asked = squeeze.question(kind, target.hardware, target.kind == "reference")
    return prepare.chosen(asked, lambda: gate_trial(kind, target), options, target)


def gate_trial(kind: squeeze.Kind, target: Target) -> Trial:
    """Our kernel, and less than a library must do: the sum and both products. Held to PyTorch's operators."""
    shape, dtype = kind.shape, TORCH_DTYPES[kind.shape.dtype]

    def make() -> list[Any]:
        generator = torch.Generator(target.device).manual_seed(0)

        def normal(*sizes: int, dtype: torch.dtype = dtype) -> Tensor:
            return torch.randn(sizes, device=target.device, generator=generator, dtype=dtype)

        sizes = (shape.hidden, shape.channels), (shape.channels, shape.hidden)
        first, second = (normal(*layer, 1, 1) / layer[1] ** 0.5 for layer in sizes)
        sums = normal(kind.pictures, kind.parts, shape.channels, dtype=torch.float32)
        return [sums, 1 / kind.parts, first, normal(shape.hidden), second, normal(shape.channels)]

    def by(function: Callable[..., Tensor], values: Sequence[Any]) -> list[Tensor]:
        return [function(*values, shape.activation, shape.gate)]

    def call(candidate: Candidate, values: Sequence[Any]) -> Callable[[], Sequence[Tensor]]:
        sums, _, first, _, second, _ = values
        if candidate.strategy != FALLBACK:
            return lambda: by(SQUEEZE, values)
        return lambda: [torch.sum(sums, 1, dtype=dtype) @ first.flatten(1).t() @ second.flatten(1).t()]

    return Trial("squeeze", make, call, lambda *values: by(squeezed, values))


def _build_ahead(kinds: Sequence[Kind], options: Options, target: Target) -> None:
    """Begin to compile the kernels that will be timed, side by side."""
    if kinds and prepare.measures(options, target):
        from tilestream.cuda.cache import compile_ahead

        with prepare.kernels_kept(options, target):
            compile_ahead([kernel(k.conv, tile_on(k, target.hardware)).source for k in dict.fromkeys(kinds)])


def depthwise_trial(kind: Kind, target: Target) -> Trial:
    """Our kernel with what it takes in, and the library's convolution without: what Inductor makes of the rest comes on
    top of that. Held to PyTorch's operators."""
    conv, tile = kind.conv, tile_on(kind, target.hardware)
    slid = (conv.stride, list(conv.padding), conv.activation, [tile.rows, tile.columns], conv.pooled)

    def make() -> list[Any]:
        generator = torch.Generator(target.device).manual_seed(0)

        def normal(*shape: int, dtype: torch.dtype = TORCH_DTYPES[conv.dtype]) -> Tensor:
            return torch.randn(shape, device=target.device, generator=generator, dtype=dtype)

        vectors = [normal(conv.channels, dtype=torch.float32) if conv.scaled else None for _ in range(2)]
        bias = normal(conv.channels) if kind.biased else None
        x = normal(kind.images, conv.height, conv.width, conv.channels)
        return [x, normal(conv.channels, 1, *conv.kernel) / conv.kernel[0], bias, *vectors]

    def call(candidate: Candidate, values: Sequence[Any]) -> Callable[[], Sequence[Tensor]]:
        x, weight, bias = values[:3]
        if candidate.strategy != FALLBACK:
            return lambda: DEPTHWISE(x, weight, *values[2:], *slid)
        numbers = ([conv.stride] * 2, list(conv.padding), [1, 1], False, [0, 0], conv.channels)
        return lambda: [torch.ops.aten.convolution(x.permute(FIRST), weight, bias, *numbers).permute(LAST)]

    def plain(x: Tensor, weight: Tensor, *vectors: Any) -> list[Tensor]:
        bias, scale, shift = vectors
        return depthwise(x, weight, bias, scale, shift, *slid)

    return Trial("depthwise convolution", make, call, plain)


def _cuda(*given: Any) -> list[Tensor]:
    from tilestream.cuda.depthwise import convolved

    return convolved(*given)


def _gates(*given: Any) -> Tensor:
    from tilestream.cuda.squeeze import gated

    return gated(*given)


on_gpu(DEPTHWISE, _cuda)
on_gpu(SQUEEZE, _gates)
