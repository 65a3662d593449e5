"""Kernels that are begun before they are asked for, and regions that are planned in the order in which theirs come."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

from tilestream.announce import said_later
from tilestream.graph.region import Region
from tilestream.ir.pipeline import Pipeline
from tilestream.options import Options
from tilestream.plan import few_rows, margins
from tilestream.plan.chooser import kept
from tilestream.plan.cost import product_bound_us
from tilestream.plan.gradient_launches import GradientLaunch
from tilestream.plan.minor import effort_for
from tilestream.plan.planner import likely_against, shortlist
from tilestream.run import gradients
from tilestream.run.collector import collect_once
from tilestream.run.executable import build_ahead, first_built
from tilestream.run.prepare import is_lone, kernels_kept, measures, near_plan, plan, question
from tilestream.run.target import Target
from tilestream.run.time_regions import begin_inductors


def begin(regions: Sequence[Region], options: Options, target: Target) -> None:
    """Begin to compile, side by side, the kernels that planning these regions will want to time.

    Those of the longest regions first: the longest kernel takes eight seconds, and everything waits for it.
    """
    longest_first = sorted(
        _of_each_program(regions, options, target), key=lambda r: (len(r.program.stages[0].ops), r.rows), reverse=True
    )
    with kernels_kept(options, target):
        # Compilers work while further regions are looked at.
        for _, pipelines in _unplanned(longest_first, options, target):
            # The best of every region first: of the others, those that are not ready in time are not timed.
            for rank, pipeline in enumerate(pipelines):
                build_ahead([pipeline], target.kind, rank)


@dataclass(frozen=True)
class _Job:
    """What is to be planned once ``pipelines`` are built."""

    name: str
    pipelines: Sequence[Pipeline]
    plan: Callable[[], object]


def plan_as_built(
    regions: Sequence[Region], options: Options, target: Target, launches: Sequence[GradientLaunch] = ()
) -> None:
    """Plan regions and launches of gradients whose kernels are to be timed, those first that are built: others are
    compiled meanwhile.

    What cannot be planned is left to ``plan_graph``, which says why.
    """
    wanted = list(_unplanned(regions, options, target))
    left = [_Job(region.name, made, partial(plan, region, options, target)) for region, made in wanted]
    for region, _ in wanted:
        _begin_fallback(region, options, target)
    if measures(options, target):
        left = [*_of_launches(launches, options, target), *left]
    collected = False
    while left:
        with kernels_kept(options, target):
            groups = [job.pipelines for job in left]
            index = first_built(groups, target.kind, 0.0, in_turn=True)
            if index is None:
                collected = collected or collect_once()
                index = first_built(groups, target.kind, margins.PATIENCE_S, in_turn=True)
            job = left.pop(index or 0)
            with said_later(job.name):  # it is planned again
                job.plan()


def _begin_fallback(region: Region, options: Options, target: Target) -> None:
    """Have Inductor compile a region that will probably be timed on it: its processes work while others are timed."""
    if options.strategy != "auto":
        return
    with said_later(region.name):
        made = question(region, options, target).propose()
        bound_us = product_bound_us(region.program, region.rows, target.hardware)
        if region.program.ragged or likely_against(made, bound_us, _most(region, options)):
            begin_inductors(region)


def _of_launches(launches: Sequence[GradientLaunch], options: Options, target: Target) -> list[_Job]:
    """One job for equal launches."""
    jobs: dict[tuple[Pipeline, int], _Job] = {}
    for launch in launches:
        with said_later(launch.name):
            pipeline, planned = launch.pipeline(target.hardware), partial(gradients.plan, launch, options, target)
            jobs.setdefault((pipeline, launch.rows), _Job(launch.name, [pipeline], planned))
    return list(jobs.values())


def may_run(region: Region, options: Options, target: Target) -> bool:
    """Whether a pipeline runs the region, or may once it is planned. One that cannot be planned runs on Inductor."""
    if region.rows <= 0 or is_lone(region, options, target):
        return False
    with said_later(region.name):
        if _is_planned(region, options, target):
            return plan(region, options, target).chosen.pipeline is not None
        return bool(_wanted(region, options, target))
    return False


def _unplanned(regions: Sequence[Region], options: Options, target: Target) -> Iterator[tuple[Region, list[Pipeline]]]:
    """A region of each program that has no plan yet, and the candidates that will be timed, best predicted first."""
    if not measures(options, target):
        return
    for region in _of_each_program(regions, options, target):
        if _is_planned(region, options, target):
            continue
        wanted = None
        with said_later(region.name):
            wanted = _wanted(region, options, target)
        if wanted is not None:
            yield region, wanted


def _of_each_program(regions: Sequence[Region], options: Options, target: Target) -> list[Region]:
    """The last region of each program that is not left to a library."""
    return list({r.program: r for r in regions if r.rows > 0 and not is_lone(r, options, target)}.values())


def _is_planned(region: Region, options: Options, target: Target) -> bool:
    """Whether this process or the disk has the region's plan."""
    near = near_plan(region, options, target)
    return (near or kept(question(region, options, target), options, measured=True)) is not None


def _wanted(region: Region, options: Options, target: Target) -> list[Pipeline]:
    """The candidates that will be timed, best predicted first."""
    made = question(region, options, target).propose()
    wanted = shortlist(made, options.strategy != "auto", _most(region, options))
    return [c.pipeline for c in wanted if c.pipeline is not None]


def _most(region: Region, options: Options) -> tuple[int, int]:
    """Shared tiles and other candidates of a region that are timed at most."""
    return few_rows.most_timed(effort_for(region, options))
