"""What Inductor cannot fuse because of regions, measured without compiling the whole graph a second time.

Each different region is compiled once more together with its neighbours (``plan.borders``). What that takes less than
the region alone and its neighbours alone is what a region takes from the whole besides its own gain.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tilestream.graph.nodes import value
from tilestream.graph.real import real
from tilestream.graph.sizes import hint
from tilestream.plan.borders import Surroundings, surrounded
from tilestream.plan.candidates import Plan
from tilestream.plan.parts import RegionAnalysis
from tilestream.plan.whole import inductor_kernels
from tilestream.run import epilogues, fallback
from tilestream.run.late_kernels import waiting_later
from tilestream.run.made_up import random_tensor
from tilestream.run.stopwatch import timed
from tilestream.run.target import Target
from tilestream.run.timing import timed_side_by_side

log = logging.getLogger(__name__)

MOST = 12
"""Different regions with neighbours that are compiled once more. Assumed: each takes half a second, and a graph of more
of them is compiled in little more."""


def lost_us(graph: fx.GraphModule, running: Sequence[RegionAnalysis], target: Target) -> float | None:
    """Microseconds of a call that Inductor saves by fusing operators of regions with their neighbours.

    None where that cannot be told: a backward chain runs, nothing is known of Inductor on a region, or too many regions
    differ. What fails is the caller's: Inductor, or timing.

    Args:
        graph: in which the regions were found, without calls of them, or a copy.
        running: what runs as pipelines. Sums of weight gradients are products, which Inductor fuses with nothing.
    """
    regions = [each for each in running if each.kind != "weight gradients"]
    if any(each.kind != "region" or each.plan is None or _alone_us(each.plan) is None for each in regions):
        return None
    by_name = {n.name: n for n in graph.graph.nodes}
    plans = {str(index): each.plan for index, each in enumerate(regions) if each.plan is not None}
    members = {str(index): [by_name[n.name] for n in each.nodes] for index, each in enumerate(regions)}
    alike: dict[object, list[tuple[Surroundings, Plan]]] = {}
    for name, found in surrounded(graph, members).items():
        key = (plans[name].chosen.pipeline, *map(_described, found.beside))
        alike.setdefault(key, []).append((found, plans[name]))
    if len(alike) > MOST:
        return None
    codes = _compiled([same[0][0].graph for same in alike.values()])
    return sum(len(same) * _lost_us(*same[0], code, target) for same, code in zip(alike.values(), codes, strict=True))


def _compiled(graphs: Sequence[fx.GraphModule]) -> list[Any]:
    """Inductor's code of each; its processes compile the kernels of all of them side by side."""
    with timed("inductor"):
        with waiting_later() as waits:
            for graph in graphs:
                epilogues.fuse(graph, {})
            codes = [fallback.compiled(graph) for graph in graphs]
        for wait in waits:
            wait()
    return codes


def _lost_us(found: Surroundings, plan: Plan, code: Any, target: Target) -> float:
    """Of one region: what it and its neighbours take apart, less what they take together."""
    alone_us = _alone_us(plan)
    assert alone_us is not None
    tf32 = torch.get_float32_matmul_precision() != "highest"
    beside_us = inductor_kernels(found.beside, target.hardware, tf32).predicted_us
    with timed("timing"), real(target.device):
        values = [_random(n) for n in found.graph.graph.find_nodes(op="placeholder")]
        (together_us,) = timed_side_by_side([lambda: code(list(values))])
    log.info("alone %.1f us, neighbours %.1f us, together %.1f us", alone_us, beside_us, together_us)
    return max(0.0, alone_us + beside_us - together_us)


def _alone_us(plan: Plan) -> float | None:
    """What Inductor takes for the region, as its gain was counted: predicted where it was not timed."""
    other = plan.fallback
    return other.predicted_us if other.measured_us is None else other.measured_us


def _random(node: fx.Node) -> object:
    if "constant" in node.meta:
        return node.meta["constant"]
    fake = node.meta["val"]
    if not isinstance(fake, torch.Tensor):
        return hint(fake)
    width = hint(fake.shape[-1]) if fake.dim() else 1
    return random_tensor(fake, scale=1 / math.sqrt(max(1, width)))


def _described(node: fx.Node) -> tuple[object, ...]:
    fake = value(node)
    shape = () if fake is None else (fake.dtype, *map(str, (*fake.shape, *fake.stride())))
    return (str(node.target), *shape)
