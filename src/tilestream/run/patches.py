"""Convolutions of patches as layers over rows: which are, by measurement where there is a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tilestream.announce import announced
from tilestream.graph.convolutions import FIRST
from tilestream.graph.patches import place, sites
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.options import Options
from tilestream.plan.candidates import FALLBACK, Candidate, Plan
from tilestream.plan.patches import Kind, kind_of, question
from tilestream.run import prepare
from tilestream.run.target import Target
from tilestream.run.timer import Trial


def cut_patches(owner: fx.GraphModule, options: Options, target: Target) -> list[Plan]:
    """Rewrite an inference graph's convolutions of patches that are faster as layers; the choices for these.

    An exception of ours costs the convolution, and is announced.

    Raises:
        TilestreamError: with ``fallback=False``.
    """
    taken: list[Plan] = []
    for site in sites(owner.graph) if options.convolutions != "off" else ():
        with announced("a convolution of patches goes to cuDNN", options.fallback):
            made = choice(kind_of(site), options, target)
            if made.wins and place(owner, [site]):
                taken.append(made)
    return taken


def choice(kind: Kind, options: Options, target: Target) -> Plan:
    """Rows or cuDNN: timed once, predicted where nothing is timed."""
    asked = question(kind, target.hardware, target.kind == "reference")
    return prepare.chosen(asked, lambda: patches_trial(kind, target), options, target)


def patches_trial(kind: Kind, target: Target) -> Trial:
    """The copy and the library's product, and cuDNN's convolution. Held to the same in float64."""
    p = kind.patches

    def make() -> list[Any]:
        generator = torch.Generator(target.device).manual_seed(0)

        def normal(*shape: int, last: bool = False) -> Tensor:
            made = torch.randn(shape, device=target.device, generator=generator, dtype=TORCH_DTYPES[p.dtype])
            return made.to(memory_format=torch.channels_last) if last else made

        (down, across), (ky, kx) = p.grid, p.kernel
        x = normal(kind.images, p.channels, down * ky, across * kx, last=p.last[0])
        weight = normal(p.out, p.channels, ky, kx, last=p.last[1]) / p.features**0.5
        return [x, weight, normal(p.out) if p.biased else None]

    def layer(x: Tensor, weight: Tensor, bias: Tensor | None) -> list[Tensor]:
        return [torch.nn.functional.linear(p.rows(x), p.matrix(weight), bias).permute(FIRST)]

    def call(candidate: Candidate, values: Sequence[Any]) -> Callable[[], Sequence[Tensor]]:
        if candidate.strategy != FALLBACK:
            return lambda: layer(*values)
        x, weight, bias = values
        return lambda: [torch.nn.functional.conv2d(x, weight, bias, p.kernel)]

    return Trial("patches", make, call, layer)
