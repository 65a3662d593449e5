"""Times a region and the sums of its gradients, joined and apart, and rejects what computes something else."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import torch
from torch.nn import functional

from tilestream.errors import PlanError
from tilestream.graph.real import real
from tilestream.graph.sizes import hint
from tilestream.ir.pipeline import Tensor
from tilestream.plan.pairs import Pair
from tilestream.reference.whole import run_whole
from tilestream.run import oracle
from tilestream.run.call import RegionCall, apply
from tilestream.run.chain_calls import ChainCalls
from tilestream.run.spec import RegionSpec, sums_spec
from tilestream.run.stopwatch import timed
from tilestream.run.target import Target
from tilestream.run.timing import capture, to_choose


def time_pair(pair: Pair, target: Target) -> tuple[float, float]:
    """Microseconds joined and apart, on random operands.

    Raises:
        PlanError: the joined kernels' results are further from float64 than twice those of eager.
    """
    chain, device = ChainCalls(pair, target.kind), target.device
    with timed("timing"), real(device):
        values = [_random(fake, device, seed) for seed, fake in enumerate(chain.given)]
        sums = sums_spec(pair.launch, pair.summed_by, target.kind)
        first, second = (RegionCall(told, device, rescue=False) for told in (chain.region, sums))
        count = len(chain.region.arguments)
        beside = dict(zip(pair.beside, values[count:], strict=True))
        inputs = {o.tensor: values[o.index] for o in chain.region.inputs}

        def apart() -> list[torch.Tensor]:
            results = dict(zip((r.tensor for r in chain.region.results), first(values[:count]), strict=True))
            known = {name: (inputs | results)[own] for name, own in pair.same.items()} | beside
            made = second([_matrix(known[o.tensor], pair.summed_by.tensor(o.tensor)) for o in sums.inputs])
            return [*made, *(results[name] for name in pair.wanted)]

        calls = [RegionCall(told, device, rescue=False) for told, _ in chain.calls]
        ours, theirs = capture(lambda: _run(calls, chain, values)), capture(apart)
        _check(ours.outputs, ours.graph, pair, values)
        us = [statistics.median(s) for s in to_choose([ours, theirs])]
    return us[0], us[1]


def _matrix(tensor: torch.Tensor, wanted: Tensor) -> torch.Tensor:
    """A tensor as the sums take it: a matrix of a width that bulk copies can address, with zeros behind its columns."""
    more = wanted.features - tensor.shape[-1]
    return (functional.pad(tensor, (0, more)) if more else tensor).flatten(0, -2)


def _random(fake: torch.Tensor, device: torch.device, seed: int) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(seed)
    size, stride = [hint(n) for n in fake.shape], [hint(n) for n in fake.stride()]
    made = torch.empty_strided(size, stride, dtype=fake.dtype, device=device)
    scale = (2 / size[-1]) ** 0.5 if len(size) == 2 and size[0] <= 64 else 1.0
    return made.copy_(torch.randn(size, device=device, generator=generator) * scale)


def _run(calls: Sequence[RegionCall], chain: ChainCalls, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Results in the order of ``chain.names``."""
    have: dict[str, torch.Tensor] = {}
    for call, (told, takes) in zip(calls, chain.calls, strict=True):
        made = call([values[n] if isinstance(n, int) else have[n] for n in takes])
        have |= {r.tensor: t for r, t in zip(told.results, made, strict=True)}
    return [have[name] for name in chain.names]


def _check(outputs: object, graph: torch.cuda.CUDAGraph, pair: Pair, values: Sequence[torch.Tensor]) -> None:
    """Replay over poisoned results: all are written, and as near to float64 as eager's."""
    assert isinstance(outputs, list)
    for output in outputs:
        output.fill_(float("nan"))
    graph.replay()
    torch.cuda.synchronize()
    chain, exact, own = ChainCalls(pair, "reference"), {}, {}
    for made, wide in ((exact, True), (own, False)):
        for told, takes in chain.calls:
            given = [values[n] if isinstance(n, int) else made[n] for n in takes]
            tensors = _operands(told, given)
            made |= run_whole(told.pipeline, {k: t.double() for k, t in tensors.items()} if wide else tensors)
    for name, got in zip(chain.names, outputs, strict=True):
        error, eager, good = oracle.judge([got], [own[name]], [exact[name]])
        if not good:
            raise PlanError(
                f"{name} of a backward chain: error against float64 is {error:.2e}, eager's {eager:.2e}",
                "report this with the model; region and sums stay apart",
            )


def _operands(told: RegionSpec, given: Sequence[torch.Tensor]) -> dict[str, torch.Tensor]:
    return {o.tensor: apply(given[o.index], o.steps) for o in (*told.inputs, *told.parameters)}
