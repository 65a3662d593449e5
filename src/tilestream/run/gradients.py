"""Launches of weight and bias gradients: pipelines of stationary sums, or the library's products.

What one region makes at a time, the gradients of its outputs, goes into one launch. Where times can be taken, it must
beat the library's products, timed beside it.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Sequence
from dataclasses import replace

from tilestream.graph.gradients import GradientSite
from tilestream.graph.selection import Cut
from tilestream.ir.pipeline import Pipeline
from tilestream.ir.serialise import pipeline_to_json
from tilestream.options import Options
from tilestream.plan.cache import PlanCache, versions
from tilestream.plan.gradient_launches import (
    GradientLaunch,
    decided,
    gradient_launches,
    proposal,
)
from tilestream.plan.planner import Plan, summary
from tilestream.run import prepare as planning
from tilestream.run.executable import build_ahead
from tilestream.run.spec import sums_spec
from tilestream.run.target import Target
from tilestream.run.time_gradients import time_gradients

log = logging.getLogger(__name__)
_plans: dict[str, Plan] = {}


def prepare(
    found: Sequence[GradientSite], cuts: Sequence[Cut], options: Options, target: Target
) -> list[GradientLaunch]:
    """Begin to compile the kernels of a graph's gradients, beside regions that run."""
    regions = {node: number for number, cut in enumerate(cuts) for node in cut.nodes}
    launches = gradient_launches(found, target.hardware, regions.get)
    pipelines = [launch.pipeline(target.hardware) for launch in launches]
    with planning.kernels_kept(options, target):
        build_ahead(list(dict.fromkeys(pipelines)), target.kind)
    return launches


def plan(launch: GradientLaunch, options: Options, target: Target) -> Plan:
    """The stationary sums and the library, and which of them runs: from this process, the disk, or made now.

    Raises:
        TilestreamError: the kernel cannot be built, or computes something else.
    """
    ours, other = proposal(launch, target.hardware)
    assert ours.pipeline is not None
    measures = planning.measures(options, target) and options.strategy == "auto"
    key = _key(ours.pipeline, launch.rows, target, measures)
    kept = PlanCache(options.cache_folder) if options.cache else None
    made = _plans.get(key) or (kept.load(key) if kept is not None else None)
    if made is None:
        if measures:
            told = sums_spec(launch, ours.pipeline, target.kind)
            ours_us, other_us = time_gradients(told, launch.layers, launch.rows, target)
            ours, other = replace(ours, measured_us=ours_us), replace(other, measured_us=other_us)
        made = decided(launch, target.hardware, ours, other, forced=target.kind == "reference")
        if kept is not None:
            kept.store(key, made)
        log.info("%s: %s", launch.name, summary(made))
    _plans[key] = made
    return made


def _key(pipeline: Pipeline, rows: int, target: Target, measured: bool) -> str:
    described = [pipeline_to_json(pipeline, sources=False), rows, target.hardware.name, target.kind, measured]
    return hashlib.sha256(json.dumps([described, versions()], sort_keys=True).encode()).hexdigest()
