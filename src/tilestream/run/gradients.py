"""Launches of weight and bias gradients: pipelines of stationary sums, or the library's products.

What one region makes at a time, the gradients of its outputs, goes into one launch. Where times can be taken, it must
beat the library's products, timed beside it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tilestream.graph.gradients import GradientSite
from tilestream.graph.selection import Cut
from tilestream.options import Options
from tilestream.plan.candidates import Plan
from tilestream.plan.gradient_launches import GradientLaunch, gradient_launches, question
from tilestream.run import prepare as planning
from tilestream.run.executable import build_ahead
from tilestream.run.target import Target
from tilestream.run.time_gradients import gradients_trial


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
