"""Times a launch of weight gradients beside a library's products, and rejects one that computes something else."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch

from tilestream.errors import PlanError
from tilestream.graph.real import real
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.plan.gradients import Gradient, bias_s
from tilestream.run import oracle
from tilestream.run.call import RegionCall
from tilestream.run.spec import RegionSpec
from tilestream.run.stopwatch import timed
from tilestream.run.target import Target
from tilestream.run.timing import capture, to_choose

MEMORY_SHARE = 0.4
"""Of the free device memory, what operands that are made up may take."""


def time_gradients(spec: RegionSpec, layers: Sequence[Gradient], rows: int, target: Target) -> tuple[float, float]:
    """Microseconds of one call, and of the same by a library: each product timed, and the least a bias's sum takes.

    Inductor fuses such sums with what is beside them, so that their time is not known before: dY read once is what none
    can do without.

    Raises:
        PlanError: results are wrong, or operands would take too much memory.
        CompileError, DeviceError: as ``cuda.build``.
    """
    with timed("timing"), real(target.device):
        operands = _operands(layers, rows, target.device)
        given = [operands[operand.tensor] for operand in spec.inputs]
        pairs = [(operands[layer.gradient], operands[layer.input]) for layer in layers]
        call = RegionCall(spec, target.device, rescue=False)
        ours, library = capture(lambda: call(given)), capture(lambda: [dy.t() @ x for dy, x in pairs])
        _check(ours.outputs, ours.graph, layers, pairs)
        ours_us, library_us = (statistics.median(s) for s in to_choose([ours, library]))
    return ours_us, library_us + bias_s(layers, rows, target.hardware) * 1e6


def _operands(layers: Sequence[Gradient], rows: int, device: torch.device) -> dict[str, torch.Tensor]:
    """Random operands by name, in memory of their own each, since what lies in the L2 counts."""
    wanted = {name: n for layer in layers for name, n in ((layer.gradient, layer.out), (layer.input, layer.k))}
    size, free = 2 * rows * sum(wanted.values()), torch.cuda.mem_get_info(device)[0]
    if size > MEMORY_SHARE * free:
        raise PlanError(
            f"operands of {size} bytes, made up for timing, are more than {MEMORY_SHARE:.0%} of {free} free"
        )
    generator = torch.Generator(device).manual_seed(0)
    dtype = TORCH_DTYPES[layers[0].dtype]
    return {name: torch.randn(rows, n, device=device, generator=generator, dtype=dtype) for name, n in wanted.items()}


def _check(
    outputs: object,
    graph: torch.cuda.CUDAGraph,
    layers: Sequence[Gradient],
    pairs: Sequence[tuple[torch.Tensor, torch.Tensor]],
) -> None:
    """Replay over poisoned outputs: every element must be written, and as near to float64 as the library's."""
    assert isinstance(outputs, list)
    for output in outputs:
        output.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    left = iter(outputs)
    for layer, (dy, x) in zip(layers, pairs, strict=True):
        wide = dy.double()
        checks = [(next(left), dy.t() @ x, wide.t() @ x.double())]
        if layer.bias:
            checks.append((next(left), dy.sum(0), wide.sum(0)))
        for got, own, exact in checks:
            error, eager, good = oracle.judge([got], [own], [exact])
            if not good:
                raise PlanError(
                    f"gradients of {layer.source or layer.weight}: error against float64 is {error:.2e}, eager's"
                    f" {eager:.2e}",
                    "report this with the model; the library's are used",
                )
