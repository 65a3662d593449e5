"""A launch of weight gradients on the GPU, beside a library's products."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.plan.gradients import Gradient, bias
from tilestream.run.call import RegionCall
from tilestream.run.made_up import check_room
from tilestream.run.spec import RegionSpec
from tilestream.run.target import Target
from tilestream.run.timer import Trial


def gradients_trial(spec: RegionSpec, layers: Sequence[Gradient], rows: int, target: Target) -> Trial:
    """A launch on random operands. Of the library each product is timed, and the least that a bias's sum takes.

    Inductor fuses such sums with what is beside them, so that their time is not known before: dY read once is what none
    can do without.
    """
    names = [operand.tensor for operand in spec.inputs]
    pairs = [(names.index(layer.gradient), names.index(layer.input)) for layer in layers]

    def call(candidate: Candidate, values: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        if candidate.pipeline is not None:
            return partial(RegionCall(spec, target.device, rescue=False), values)
        return lambda: [values[dy].t() @ values[x] for dy, x in pairs]

    def plain(*values: Tensor) -> list[Tensor]:
        made: list[Tensor] = []
        for layer, (dy, x) in zip(layers, pairs, strict=True):
            made += [values[dy].t() @ values[x], *([values[dy].sum(0)] if layer.bias else [])]
        return made

    def beside_us(candidate: Candidate) -> float:
        return bias(layers, rows, target.hardware).seconds * 1e6 if candidate.strategy == FALLBACK else 0.0

    make = partial(_operands, names, layers, rows, target.device)
    return Trial("weight gradients", make, call, plain, beside_us=beside_us)


def _operands(names: Sequence[str], layers: Sequence[Gradient], rows: int, device: torch.device) -> list[Tensor]:
    """Random operands, in memory of their own each, since what lies in the L2 counts."""
    widths = {name: n for layer in layers for name, n in ((layer.gradient, layer.out), (layer.input, layer.k))}
    dtype = TORCH_DTYPES[layers[0].dtype]
    check_room(dtype.itemsize * rows * sum(widths.values()), device)
    generator = torch.Generator(device).manual_seed(0)
    return [torch.randn(rows, widths[name], device=device, generator=generator, dtype=dtype) for name in names]
