"""A region's candidates on the GPU, beside what Inductor makes of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

from torch import Tensor, fx

from tilestream.graph.modules import copied
from tilestream.graph.region import Region
from tilestream.ir.pipeline import Pipeline
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.run import cold, epilogues, fallback
from tilestream.run.call import RegionCall
from tilestream.run.made_up import random_arguments
from tilestream.run.spec import spec_of
from tilestream.run.stopwatch import timed
from tilestream.run.target import Target
from tilestream.run.timer import Trial


def region_trial(
    region: Region,
    target: Target,
    constant: bool = False,
    graphs: Mapping[str, fx.GraphModule] = MappingProxyType({}),
    present: Pipeline | None = None,
) -> Trial:
    """A region on fresh random inputs, held to its own graph; on weights from DRAM where they are cold.

    Args:
        constant: whether weights are copied once, not at every call.
        graphs: what Inductor is given for a candidate, by its strategy, where that is not the region's own graph: with
            a smaller region in it, as the whole graph would have it.
        present: the pipeline that is the fallback, where that is not what Inductor makes of the region.
    """

    given: list[Sequence[Any]] = []

    def call(candidate: Candidate, values: Sequence[Any]) -> Callable[[], Sequence[Tensor]]:
        if not given:
            given.extend(cold.sets(region, values, target.hardware.l2_bytes))
        return cold.in_turn(run(candidate), given)

    def run(candidate: Candidate) -> fallback.Call:
        pipeline = present if candidate.strategy == FALLBACK else candidate.pipeline
        if pipeline is not None:
            spec = spec_of(region, pipeline, target.kind, constant)
            return RegionCall(spec, target.device, rescue=False).on_values
        with timed("inductor"):
            graph = graphs.get(candidate.strategy)
            return _inductors(region) if graph is None else fallback.rest(graph)

    return Trial(region.name, partial(random_arguments, region), call, region.graph)


_begun: WeakKeyDictionary[fx.GraphModule, Callable[[], fallback.Call]] = WeakKeyDictionary()


def begin_inductors(region: Region) -> None:
    """Have Inductor's processes compile the kernels of a region that will be timed on it, while others are timed."""
    with timed("inductor"):
        _begun[region.graph] = fallback.begin(as_left(region))


def _inductors(region: Region) -> fallback.Call:
    """What Inductor makes of a region, which may have begun."""
    begun = _begun.pop(region.graph, None)
    return fallback.rest(as_left(region)) if begun is None else begun()


def as_left(region: Region) -> fx.GraphModule:
    """What Inductor is given of a region that is none: activations are epilogues of products, as in the whole graph."""
    graph = copied(region.graph)
    epilogues.fuse(graph, {})
    return graph
