"""Times a region and the sums of its gradients, joined and apart, and rejects what computes something else."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch import fx
from torch.nn import functional

from tilestream.errors import PlanError
from tilestream.graph.nodes import value
from tilestream.graph.origins import origin_of, unpadded
from tilestream.graph.real import real
from tilestream.graph.sizes import hint
from tilestream.reference.whole import run_whole
from tilestream.run import oracle
from tilestream.run.call import RegionCall, apply
from tilestream.run.chain_pairs import (
    Pair,
    arguments,
    maker_of,
    names,
    result_of,
    specs,
    tensors_of,
)
from tilestream.run.spec import RegionSpec, decode
from tilestream.run.stopwatch import timed
from tilestream.run.target import Target
from tilestream.run.timing import capture, to_choose


def time_pair(pair: Pair, target: Target) -> tuple[float, float]:
    """Microseconds joined and apart, on random operands.

    Raises:
        PlanError: the joined kernels' results are further from float64 than twice those of eager.
    """
    device = target.device
    with timed("timing"), real(device):
        values = [_random(node, device, seed) for seed, node in enumerate(pair.given)]
        first, second = (RegionCall(decode(str(n.args[2])), device, rescue=False) for n in (pair.region, pair.sums))
        region, sums = tensors_of(pair.region), tensors_of(pair.sums)
        at = {origin_of(node): k for k, node in enumerate(pair.given)}

        def given(node: fx.Node) -> torch.Tensor:
            whole = origin_of(node)
            return values[at[whole if whole in at else unpadded(node)]]

        def apart() -> list[torch.Tensor]:
            made = first(values[: len(region)])
            taken = [_like(made[result_of(n)] if maker_of(n) is pair.region else given(n), n) for n in sums]
            return [*second(taken), *(made[k] for k in _left(pair))]

        calls = [RegionCall(told, device, rescue=False) for told in specs(pair, target.kind)]
        ours, theirs = capture(lambda: _run(calls, pair, values)), capture(apart)
        _check(ours.outputs, ours.graph, pair, values)
        us = [statistics.median(s) for s in to_choose([ours, theirs])]
    return us[0], us[1]


def _like(tensor: torch.Tensor, node: fx.Node) -> torch.Tensor:
    """A tensor in the shape of a node, which may have more columns: zeros."""
    fake = value(node)
    assert fake is not None
    shape = [hint(n) for n in fake.shape]
    more = shape[-1] - tensor.shape[-1]
    return (functional.pad(tensor, (0, more)) if more else tensor).reshape(shape)


def _left(pair: Pair) -> list[int]:
    """Results of the region that are left, in order."""
    names = [r.tensor for r in decode(str(pair.region.args[2])).results]
    return [names.index(name) for name in pair.wanted]


def _random(node: fx.Node, device: torch.device, seed: int) -> torch.Tensor:
    fake = value(node)
    assert fake is not None
    generator = torch.Generator(device).manual_seed(seed)
    size, stride = [hint(n) for n in fake.shape], [hint(n) for n in fake.stride()]
    made = torch.empty_strided(size, stride, dtype=fake.dtype, device=device)
    scale = (2 / size[-1]) ** 0.5 if len(size) == 2 and size[0] <= 64 else 1.0
    return made.copy_(torch.randn(size, device=device, generator=generator) * scale)


def _run(calls: Sequence[RegionCall], pair: Pair, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results in the order of ``names``: those of the sums, then what is left of the region's."""
    have: dict[str, torch.Tensor] = {}
    for call, nodes in zip(calls, arguments(pair), strict=True):
        given = [values[n] if isinstance(n, int) else have[n] for n in nodes]
        made = call(given)
        have |= {r.tensor: t for r, t in zip(call.spec.results, made, strict=True)}
    return [have[name] for name in names(pair)]


def _check(outputs: object, graph: torch.cuda.CUDAGraph, pair: Pair, values: Sequence[torch.Tensor]) -> None:
    """Replay over poisoned results: all are written, and as near to float64 as eager's."""
    assert isinstance(outputs, list)
    for output in outputs:
        output.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    exact, own = ({} for _ in range(2))
    for made, wide in ((exact, True), (own, False)):
        for told, nodes in zip(specs(pair, "reference"), arguments(pair), strict=True):
            given = [values[n] if isinstance(n, int) else made[n] for n in nodes]
            tensors = _operands(told, given)
            made |= run_whole(told.pipeline, {k: t.double() for k, t in tensors.items()} if wide else tensors)
    for name, got in zip(names(pair), outputs, strict=True):
        error, eager, good = oracle.judge([got], [own[name]], [exact[name]])
        if not good:
            raise PlanError(
                f"{name} of a backward chain: error against float64 is {error:.2e}, eager's {eager:.2e}",
                "report this with the model; region and sums stay apart",
            )


def _operands(told: RegionSpec, given: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {o.tensor: apply(given[o.index], o.steps) for o in (*told.inputs, *told.parameters)}
