"""The plan of a region, and what runs it: a pipeline, or the fallback."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from tilestream.announce import announce, announce_failure, first_line
from tilestream.devices import Device
from tilestream.errors import PlanError, TilestreamError
from tilestream.graph.region import Region
from tilestream.ir.pipeline import Pipeline
from tilestream.ir.taps import pictures
from tilestream.kernels.parts.source import BesideSource
from tilestream.options import Options
from tilestream.plan import chooser, few_rows, find, planner, ragged
from tilestream.plan.candidates import Plan
from tilestream.plan.chooser import Question, alternative, choose, kept
from tilestream.plan.find import LONE, NO_ROWS
from tilestream.plan.minor import effort_for
from tilestream.plan.parts import RegionAnalysis
from tilestream.plan.planner import without
from tilestream.plan.turned import turned
from tilestream.run.executable import executable
from tilestream.run.target import Target
from tilestream.run.time_regions import region_trial
from tilestream.run.timer import Timer, Trial

GROWTH = 4
"""A region is planned anew where its rows have grown by more than this factor: more stages may pay then."""

log = logging.getLogger(__name__)

_Key = tuple[Pipeline, Device, Options, bool, bool, tuple[str, ...]]
_plans: dict[_Key, list[Plan]] = {}
_analyses: list[RegionAnalysis] = []


def note(made: Sequence[RegionAnalysis]) -> None:
    """Add to what ``analyses`` tells; not the user's graph with its tensors."""
    for each in made:
        _analyses.extend(replace(a, nodes=(), parts=(), of=None) for a in (*each.parts, each))


def analyses() -> list[RegionAnalysis]:
    """The regions that this process has compiled so far, with the plans that they really use."""
    return list(_analyses)


def kernels_kept(options: Options, target: Target) -> contextlib.AbstractContextManager[None]:
    """Where the options say that kernels are kept, for those built inside."""
    if target.kind != "cuda":
        return contextlib.nullcontext()
    from tilestream.cuda import cache

    return cache.keep_in(options.cache_folder if options.cache else None)


def begin_building(sources: Sequence[BesideSource], options: Options, target: Target) -> None:
    """Begin to compile kernels side by side, on a GPU, beside what comes until they are asked for."""
    if sources and target.kind == "cuda":
        from tilestream.cuda.cache import compile_ahead

        with kernels_kept(options, target):
            compile_ahead(sources)


def plan(region: Region, options: Options, target: Target) -> Plan:
    """The plan of a region: from this process, from the disk, or made now (and measured, on a GPU).

    A plan serves every number of rows up to ``GROWTH`` times its own: a new batch builds no new kernel.

    Raises:
        PlanError: no pipeline is legal under the options.
    """
    if (near := near_plan(region, options, target)) is not None:
        return near
    timer = None
    if measures(options, target):
        timer = Timer(region_trial(region, target, options.constant_weights), target, few_rows.patience_s(options))
    made = chooser.choose(question(region, options, target), options, timer)
    _plans.setdefault(_key(region, options, target), []).append(made)
    return made


def question(region: Region, options: Options, target: Target) -> Question:
    """Which kernel runs a region; the fallback is no alternative to the reference machine."""
    if target.kind == "reference":  # else as they are: what was proposed for them is known
        options = options.with_(target="reference")
    options = effort_for(region, options)
    if region.program.ragged:
        asked = ragged.question(region, target.hardware, options)
    else:
        asked = planner.question(region.program, region.rows, target.hardware, options, turned(region, options))
    return replace(asked, decides=lambda: ["cold", asked.decides()]) if region.cold else asked


def measures(options: Options, target: Target) -> bool:
    """Whether candidates are timed: on a GPU, unless options forbid it, or a stream is captured there."""
    return target.kind == "cuda" and options.measure and not torch.cuda.is_current_stream_capturing()


def chosen(asked: Question, trial: Callable[[], Trial], options: Options, target: Target) -> Plan:
    """The answer to a question: by times of ``trial`` where candidates are timed and no strategy is asked for, else
    predicted. Kernels are kept where the options say so."""
    timed = measures(options, target) and options.strategy == "auto"
    with kernels_kept(options, target):
        return chooser.choose(asked, options, Timer(trial(), target) if timed else None)


@dataclass(frozen=True)
class Kind:
    """What decides the times of a region's graph said otherwise: the key of the region's plan, and how many of its
    layers are left to a library."""

    plan: str
    left: int


def wins(
    name: str,
    region: Region,
    make: Callable[[], fx.GraphModule | None],
    options: Options,
    target: Target,
    left: int = 0,
) -> bool:
    """Whether a region's graph said otherwise takes less than what the region's plan chose: as was found in this
    process or before, or timed now.

    Args:
        name: of the choice.
        make: the other graph, where it is timed; None where there is none.
        left: layers that it leaves to a library.
    """
    kind = Kind(question(region, options, target).key(measured=True), left)
    asked = alternative(name, kind, target.hardware)
    found = kept(asked, options, measured=True)
    if found is not None:
        return found.wins
    graph = make()
    if graph is None:
        return False
    present = plan(region, options, target).chosen.pipeline
    trial = region_trial(region, target, options.constant_weights, {name: graph}, present)
    return choose(asked, options, Timer(trial, target)).wins


def _key(region: Region, options: Options, target: Target) -> _Key:
    """What a plan is kept by: torch's own flag decides which candidates there are; how weights lie, and whether
    they are cold, their times."""
    lying, options = turned(region, options).weights, effort_for(region, options)
    return region.program, target.hardware, options, region.cold, few_rows.in_any_order(options), lying


def near_plan(region: Region, options: Options, target: Target) -> Plan | None:
    """The plan of this process that serves the region's rows best, if any does."""
    made = _plans.get(_key(region, options, target), ())
    near = [p for p in made if _serves(p, region)]
    return min(near, key=lambda p: abs(math.log(p.rows / region.rows)), default=None)


def _serves(p: Plan, region: Region) -> bool:
    """Whether a plan of the region's program is one for its rows. One made for many pictures is none for few: the nine
    taps of a tile take long, and others have a tile's time alone (a bottleneck's tail of 28 x 28 at one image: 28.9 us
    by the kernel that is the fastest at 32, where Inductor takes 14.5)."""
    if pictures(region.program) and p.rows > GROWTH * region.rows:
        return False
    return GROWTH * p.rows >= region.rows and few_rows.same_bin(region.program, p.rows, region.rows)


def is_lone(region: Region, options: Options, target: Target) -> bool:
    """Whether a region is left to a library; never on the reference machine, which was asked for."""
    return target.kind == "cuda" and find.is_lone(region, options)


def prefers_fallback(analysis: RegionAnalysis) -> bool:
    """Whether a region was left to Inductor, or to a library, since that is as fast; not where it had no choice."""
    if analysis.problem or analysis.plan is None:
        return analysis.problem == LONE
    return not analysis.plan.wins


def planned(region: Region, options: Options, target: Target) -> tuple[Plan | None, str]:
    """The plan of a region, whose pipeline, if it has one, is built and ready; or why there is none.

    What cannot be planned or built is announced, whatever the exception; with ``fallback=False`` it is an error.

    Raises:
        TilestreamError: with ``fallback=False``: why the region cannot run as a pipeline.
    """
    if region.device.type != target.device.type:
        why = f"its tensors are on {region.device}"
        announce(f"{region.name} goes to Inductor: {why}")
        return None, why
    if region.rows == 0:
        return None, NO_ROWS
    if is_lone(region, options, target):
        return None, LONE
    found: Plan | None = None
    place = f"{region.name} ({region.sources[0] if region.sources else 'no source line'})"
    try:
        with kernels_kept(options, target):
            found = built_plan(region, options, target)
            pipeline = found.chosen.pipeline
        if pipeline is None and not options.fallback:
            raise PlanError(f"{region.name}: no pipeline is faster than Inductor", "allow fallback=True")
    except Exception as failure:
        if not options.fallback:
            raise
        announce_failure(f"{place} goes to Inductor", failure)
        return found, first_line(failure)
    if pipeline is None:
        log.info("%s goes to Inductor: it is the fastest (%s)", place, found.summary())
    return found, ""


def built_plan(region: Region, options: Options, target: Target) -> Plan:
    """The plan of a region, whose pipeline, if it has one, is built and ready. Where kernels cannot be built, ``auto``
    falls back on what is left of the plan.

    Raises:
        PlanError: as ``plan``.
        TilestreamError: nothing is left that beats Inductor; why the last one could not be built.
    """
    made = found = plan(region, options, target)
    while (pipeline := found.chosen.pipeline) is not None:
        try:
            executable(pipeline, target.kind, target.device)
            break
        except TilestreamError as failure:
            why = f"could not be built: {first_line(failure)}"
            other = without(found, why) if options.strategy == "auto" else None
            if other is None:
                raise
            log.warning("%s: %s %s; %s is tried", region.name, found.chosen.name, why, other.chosen.name)
            found = other
    if found is not made:  # nor does another region of this program try in vain
        key = _key(region, options, target)
        _plans[key] = [found if p is made else p for p in _plans.get(key, ())]
    return found
