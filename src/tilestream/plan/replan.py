"""The same model planned otherwise: for another device, by another strategy."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from tilestream.devices import Device
from tilestream.errors import TilestreamError
from tilestream.plan import planner
from tilestream.plan.analysis import Analysis
from tilestream.plan.gradients import STRATEGY as STATIONARY
from tilestream.plan.parts import RegionAnalysis
from tilestream.plan.whole import region_kernels

STRATEGIES = ("vertical", "spatial", "shared", "bulk")


def replan(analysis: Analysis, device: Device | None = None, strategy: str | None = None) -> Analysis:
    """The same regions planned for another device, by another strategy, or both; predictions only.

    A region that has no pipeline of ``strategy`` has no plan, and is Inductor's. Sums of gradients, which no strategy
    plans otherwise, stay on the device that they were made for; of a backward chain the region and its sums are apart.
    """
    hardware = device or analysis.hardware
    assert hardware is not None
    options = analysis.options if strategy is None else analysis.options.with_(strategy=strategy)
    regions = []
    for region in (part for r in analysis.regions for part in r.parts or (r,)):
        plan, problem = None, region.problem
        if region.program.strategy == STATIONARY:
            plan = region.plan if hardware == analysis.hardware else None
            problem = problem if plan else f"sums of gradients are of {analysis.device}: analyse for {hardware.name}"
        elif region.rows:
            try:
                shown = partial(_inductor_us, region, hardware, analysis.tf32) if region.nodes else None
                plan, problem = planner.plan(region.program, region.rows, hardware, options, fallback_us=shown), ""
            except TilestreamError as failure:
                problem = str(failure)
        regions.append(replace(region, plan=plan, problem=problem))
    return replace(
        analysis,
        device=hardware.name,
        hardware=hardware,
        options=options,
        regions=tuple(regions),
        measured_us=None,
        inductor_measured_us=None,
    )


def _inductor_us(region: RegionAnalysis, hardware: Device, tf32: bool) -> float:
    """What is shown of Inductor's kernels of a region."""
    return region_kernels(region, hardware, tf32).predicted_us


def by_strategy(analysis: Analysis) -> dict[str, Analysis]:
    """``analysis`` by each strategy that has a pipeline for any of its regions; the plan it has by ``auto`` first."""
    own = str(analysis.options.strategy)
    if own != "auto":
        return {own: analysis}
    made = {name: replan(analysis, strategy=name) for name in STRATEGIES}
    return {own: analysis} | {name: a for name, a in made.items() if any(map(_has_a_choice, a.regions))}


def _has_a_choice(region: RegionAnalysis) -> bool:
    return region.plan is not None and region.program.strategy != STATIONARY


def predictions(analysis: Analysis) -> dict[str, float]:
    """Strategy to predicted microseconds of the whole model; ``inductor``: with no pipeline at all."""
    found = {name: us for name, a in by_strategy(analysis).items() if (us := a.predicted_us) is not None}
    other = analysis.inductor_predicted_us
    return found if other is None else {**found, "inductor": other}
