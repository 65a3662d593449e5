"""The plan of a region, and what runs it: a pipeline, or the fallback."""

from __future__ import annotations

import contextlib
import math

import torch

from tilestream import fallback
from tilestream.analysis import RegionAnalysis
from tilestream.devices import Device
from tilestream.errors import PlanError, TilestreamError
from tilestream.execution import RegionCall, executable
from tilestream.ir import Pipeline
from tilestream.lower import Region
from tilestream.measure import Measurer
from tilestream.options import Options
from tilestream.plan_cache import cached_plan
from tilestream.planner import Candidate, Measure, Plan, summary
from tilestream.target import Target

GROWTH = 4
"""A region is planned anew where its rows have grown by more than this factor: more stages may pay then."""

_plans: dict[tuple[Pipeline, Device, Options], list[Plan]] = {}
_analyses: list[RegionAnalysis] = []


def analyses() -> list[RegionAnalysis]:
    """The regions that this process has compiled so far, with the plans that they really use."""
    return list(_analyses)


def _kernels_kept(options: Options, target: Target) -> contextlib.AbstractContextManager[None]:
    """Where the options say that kernels are kept, for those built inside."""
    if target.kind != "cuda":
        return contextlib.nullcontext()
    from tilestream.cuda import cache

    return cache.keep_in(options.cache_folder if options.cache else None)


def plan(region: Region, options: Options, target: Target) -> Plan:
    """The plan of a region: from this process, from the disk, or made now (and measured, on a GPU).

    A plan serves every number of rows up to ``GROWTH`` times its own: a new batch builds no new kernel.

    Raises:
        PlanError: no pipeline is legal under the options.
    """
    made = _plans.setdefault((region.program, target.hardware, options), [])
    near = [p for p in made if GROWTH * p.rows >= region.rows]
    if near:
        return min(near, key=lambda p: abs(math.log(p.rows / region.rows)))
    measure: Measure | None = None
    if target.kind == "cuda" and options.measure and not torch.cuda.is_current_stream_capturing():
        measure = Measurer(region, target, against=options.strategy == "auto")
    made.append(cached_plan(region.program, region.rows, target.hardware, options, measure))
    return made[-1]


def choose(found: Plan, target: Target) -> Candidate:
    """The candidate that runs. The reference machine was asked for, so it never gives way to Inductor."""
    if target.kind != "reference" or found.chosen.pipeline is not None:
        return found.chosen
    legal = [c for c in found.candidates if c.pipeline is not None and not c.rejected]
    if not legal:
        reasons = "; ".join(f"{c.name}: {c.rejected}" for c in found.candidates if c.rejected)
        raise PlanError(f"{found.region} has no legal pipeline ({reasons})", "allow another strategy or device")
    return min(legal, key=lambda c: c.predicted_us or float("inf"))


def compile_region(region: Region, options: Options, target: Target) -> fallback.Call | None:
    """A callable for a region, which takes its arguments and returns its results; ``None`` if Inductor runs it.

    What cannot be planned or built is announced; with ``fallback=False`` it is an error.

    Raises:
        TilestreamError: with ``fallback=False``: why the region cannot run as a pipeline.
    """
    problem, found, pipeline = "", None, None
    if region.rows == 0:
        return fallback.eager(region.graph)  # nothing to plan for: every result is empty
    try:
        with _kernels_kept(options, target):
            found = plan(region, options, target)
            pipeline = choose(found, target).pipeline
            if pipeline is None and not options.fallback:
                raise PlanError(f"{region.name}: no pipeline is faster than Inductor", "allow fallback=True")
            if pipeline is not None:
                call = RegionCall(region, executable(pipeline, target))
                _analyses.append(_analysis(region, found))
                return call
    except TilestreamError as failure:
        if not options.fallback:
            raise
        problem = str(failure)
    why = problem or (f"it is the fastest ({summary(found)})" if found is not None else "no plan")
    fallback.announce(f"{region.name} ({region.sources[0] if region.sources else '?'}) goes to Inductor: {why}")
    _analyses.append(_analysis(region, found, problem))
    return None


def _analysis(region: Region, found: Plan | None, problem: str = "") -> RegionAnalysis:
    return RegionAnalysis(region.name, 0, region.rows, region.operators, region.sources, region.program, found, problem)
