"""A region and the sums of its gradients on the GPU, joined and apart."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from torch.nn import functional

from tilestream.graph.sizes import hint
from tilestream.ir import pipeline
from tilestream.plan.candidates import Candidate
from tilestream.plan.pairs import Pair
from tilestream.reference.whole import run_whole
from tilestream.run.call import RegionCall, apply
from tilestream.run.chain_calls import ChainCalls
from tilestream.run.made_up import random_tensor
from tilestream.run.spec import RegionSpec, sums_spec
from tilestream.run.target import Target
from tilestream.run.timer import Trial

Run = Callable[[Sequence[Tensor]], Mapping[str, Tensor]]
"""One launch: its arguments to its results by name."""


def chain_trial(pair: Pair, target: Target) -> Trial:
    """Both ways on random operands; results in the order of ``ChainCalls.names``."""
    chain, plainly = ChainCalls(pair, target.kind), ChainCalls(pair, "reference")

    def make() -> list[Tensor]:
        return [_random(fake, target.device, seed) for seed, fake in enumerate(chain.given)]

    def call(candidate: Candidate, values: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        if candidate.pipeline is None:
            return _apart(pair, chain, values, target)
        runs = [_launched(told, target.device) for told, _ in chain.calls]
        return lambda: _joined(chain, runs, values)

    def plain(*values: Tensor) -> list[Tensor]:
        return _joined(plainly, [_by_operators(told) for told, _ in plainly.calls], values)

    def pipelines(candidate: Candidate) -> Sequence[pipeline.Pipeline]:
        return () if candidate.pipeline is None else pair.joined.pipelines

    return Trial("backward chain", make, call, plain, pipelines=pipelines)


def _joined(chain: ChainCalls, runs: Sequence[Run], values: Sequence[Tensor]) -> list[Tensor]:
    """The results of launches one after another."""
    have: dict[str, Tensor] = {}
    for run, (_, takes) in zip(runs, chain.calls, strict=True):
        have |= run([values[n] if isinstance(n, int) else have[n] for n in takes])
    return [have[name] for name in chain.names]


def _launched(told: RegionSpec, device: torch.device) -> Run:
    call = RegionCall(told, device, rescue=False)
    return lambda given: {r.tensor: t for r, t in zip(told.results, call(given), strict=True)}


def _by_operators(told: RegionSpec) -> Run:
    operands = (*told.inputs, *told.parameters)
    return lambda given: run_whole(told.pipeline, {o.tensor: apply(given[o.index], o.steps) for o in operands})


def _apart(pair: Pair, chain: ChainCalls, values: Sequence[Tensor], target: Target) -> Callable[[], Sequence[Tensor]]:
    told = sums_spec(pair.launch, pair.summed_by, target.kind)
    first, second = _launched(chain.region, target.device), RegionCall(told, target.device, rescue=False)
    count = len(chain.region.arguments)
    beside = dict(zip(pair.beside, values[count:], strict=True))
    inputs = {o.tensor: values[o.index] for o in chain.region.inputs}

    def run() -> list[Tensor]:
        results = first(values[:count])
        known = {name: {**inputs, **results}[own] for name, own in pair.same.items()} | beside
        made = second([_matrix(known[o.tensor], pair.summed_by.tensor(o.tensor)) for o in told.inputs])
        return [*made, *(results[name] for name in pair.wanted)]

    return run


def _matrix(tensor: Tensor, wanted: pipeline.Tensor) -> Tensor:
    """A tensor as the sums take it: a matrix of a width that bulk copies can address, with zeros behind its columns."""
    more = wanted.features - tensor.shape[-1]
    return (functional.pad(tensor, (0, more)) if more else tensor).flatten(0, -2)


def _random(fake: Tensor, device: torch.device, seed: int) -> Tensor:
    """Like an operand; weights keep activations of order one."""
    size = [hint(n) for n in fake.shape]
    scale = (2 / size[-1]) ** 0.5 if len(size) == 2 and size[0] <= 64 else 1.0
    return random_tensor(fake, torch.Generator(device).manual_seed(seed), scale)
