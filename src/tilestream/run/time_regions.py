"""A region's candidates on the GPU, beside what Inductor makes of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import cycle
from types import MappingProxyType
from typing import Any, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor, fx

from tilestream.graph.modules import copied
from tilestream.graph.region import Region
from tilestream.ir.pipeline import Pipeline
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.run import epilogues, fallback
from tilestream.run.call import RegionCall
from tilestream.run.made_up import random_arguments
from tilestream.run.spec import spec_of
from tilestream.run.stopwatch import timed
from tilestream.run.target import Target
from tilestream.run.timer import Trial
from tilestream.run.timing import MOST_CALLS

TIMES_L2 = 2
"""What lies between two reads of a weight, in sizes of the L2; as ``benchmarks`` does for cold rows."""

T = TypeVar("T")


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
            given.extend(cold_sets(region, values, target.hardware.l2_bytes))
        return in_turn(run(candidate), given)

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


def cold_sets(region: Region, values: Sequence[Any], l2_bytes: float) -> list[Sequence[Any]]:
    """``values`` of a region's arguments, and where the region is cold, copies that differ in where its weights lie:
    as many as are ``TIMES_L2`` of the L2, but at most what is captured.

    They are not in the L2 then when the region starts, as in a model that moves more than it holds. Timed warm,
    SmolLM's down projection took what eager's took on an H100 (8.8 us), and from DRAM 1.3 times that.
    """
    weights = {p.index: values[p.index] for p in region.parameters}
    size = sum(w.numel() * w.element_size() for w in weights.values())
    if not region.cold or not size:
        return [values]
    count = min(MOST_CALLS, math.ceil(TIMES_L2 * l2_bytes / size))
    found = [values]
    for _ in range(count - 1):
        copies = {index: weight.clone() for index, weight in weights.items()}
        found.append([copies.get(index, value) for index, value in enumerate(values)])
    return found


def in_turn(run: Callable[[Sequence[Any]], T], given: Sequence[Sequence[Any]]) -> Callable[[], T]:
    """A call of ``run`` on the next of ``given``, all of which it has seen: what a first call makes is there."""
    if len(given) == 1:
        return partial(run, given[0])
    for values in given:
        run(values)
    turns = cycle(given)
    return lambda: run(next(turns))
