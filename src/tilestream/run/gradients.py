"""Launches of weight and bias gradients: pipelines of stationary sums, or the library's products.

What one region makes at a time, the gradients of its outputs, goes into one launch. Where times can be taken, it must
beat the library's products, timed beside it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor

from tilestream.graph.costs.work import size
from tilestream.graph.gradients import GradientSite
from tilestream.graph.selection import Cut
from tilestream.options import Options
from tilestream.plan.candidates import FALLBACK, Candidate, Plan
from tilestream.plan.gradient_launches import GradientLaunch, gradient_launches, question
from tilestream.plan.gradients import bias
from tilestream.run import prepare as planning
from tilestream.run.call import RegionCall
from tilestream.run.executable import build_ahead
from tilestream.run.made_up import check_room, random_tensor
from tilestream.run.spec import sums_spec
from tilestream.run.target import Target
from tilestream.run.timer import Trial


def prepare(
    found: Sequence[GradientSite], cuts: Sequence[Cut], options: Options, target: Target
) -> list[GradientLaunch]:
    """Begin to compile the kernels of a graph's gradients, beside regions that run."""
    launches = gradient_launches(found, target.hardware, [cut.nodes for cut in cuts])
    pipelines = [launch.pipeline(target.hardware) for launch in launches]
    with planning.kernels_kept(options, target):
        build_ahead(list(dict.fromkeys(pipelines)), target.kind)
    return launches


def plan(launch: GradientLaunch, options: Options, target: Target) -> Plan:
    """The stationary sums and the library, and which of them runs: from this process, the disk, or made now."""
    asked = question(launch, target.hardware, forced=target.kind == "reference")
    return planning.chosen(asked, lambda: gradients_trial(launch, target), options, target)


def gradients_trial(launch: GradientLaunch, target: Target) -> Trial:
    """A launch on random operands. Of the library each product is timed, and the least that a bias's sum takes.

    Inductor fuses such sums with what is beside them, so that their time is not known before: dY read once is what none
    can do without.
    """
    spec = sums_spec(launch, launch.pipeline(target.hardware), target.kind)
    layers, names = launch.layers, list(launch.operands)
    pairs = [(names.index(layer.gradient), names.index(layer.input)) for layer in layers]

    def make() -> list[Tensor]:
        """In memory of their own each, since what lies in the L2 counts."""
        fakes = [launch.widened(node) for node in launch.operands.values()]
        check_room(sum(int(size(fake)) * fake.element_size() for fake in fakes), target.device)
        generator = torch.Generator(target.device).manual_seed(0)
        return [random_tensor(fake, generator) for fake in fakes]

    def call(candidate: Candidate, values: Sequence[Tensor]) -> Callable[[], Sequence[Tensor]]:
        if candidate.pipeline is not None:
            return partial(RegionCall(spec, target.device, rescue=False), values)
        return lambda: [values[dy].t() @ values[x] for dy, x in pairs]

    def plain(*values: Tensor) -> list[Tensor]:
        given = [(layer, values[dy], values[x]) for layer, (dy, x) in zip(layers, pairs, strict=True)]
        return [t for layer, dy, x in given for t in (dy.t() @ x, *([dy.sum(0)] if layer.bias else []))]

    def beside_us(candidate: Candidate) -> float:
        return bias(layers, launch.rows, target.hardware).seconds * 1e6 if candidate.strategy == FALLBACK else 0.0

    return Trial("weight gradients", make, call, plain, beside_us=beside_us)
