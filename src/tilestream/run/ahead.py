"""Kernels that are begun before they are asked for, and regions that are planned in the order in which theirs come."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest

from tilestream.graph.region import Region
from tilestream.ir.pipeline import Pipeline
from tilestream.options import Options
from tilestream.plan import few_rows
from tilestream.plan.cache import is_cached
from tilestream.plan.cost import product_bound_us
from tilestream.plan.planner import FALLBACK, Candidate, in_doubt, proposals, shortlist
from tilestream.plan.turned import turned
from tilestream.run.executable import build_ahead, first_built
from tilestream.run.measure import PATIENCE_S, Measurer
from tilestream.run.prepare import is_lone, kernels_kept, measurer_of, measures, near_plan, plan
from tilestream.run.target import Target

log = logging.getLogger(__name__)


@dataclass
class Unplanned:
    """A region whose candidates will be timed.

    Attributes:
        pipelines: the candidates, best predicted first.
        doubtful: whether Inductor is likely to be timed beside them, and has not compiled the region yet.
    """

    region: Region
    pipelines: list[Pipeline]
    doubtful: bool


def begin(regions: Sequence[Region], options: Options, target: Target) -> None:
    """Begin to compile, side by side, the kernels that planning these regions will want to time."""
    # The best of every region first: of the others, those that are not ready in time are not timed.
    ranks = zip_longest(*(each.pipelines for each in _unplanned(regions, options, target)))
    with kernels_kept(options, target):
        for rank, pipelines in enumerate(ranks):
            build_ahead([p for p in pipelines if p is not None], target.kind, rank)


def plan_as_built(regions: Sequence[Region], options: Options, target: Target) -> None:
    """Plan regions whose kernels are to be timed, those first that are built: others are compiled meanwhile.

    While none is built, Inductor compiles what it will be timed with. What cannot be planned is left to
    ``prepare.pipeline_of``, which says why.
    """
    left = [(each, measurer_of(each.region, options, target)) for each in _unplanned(regions, options, target)]
    while left:
        doubtful = next((pair for pair in left if pair[0].doubtful), None)
        with kernels_kept(options, target):
            patience_s = PATIENCE_S if doubtful is None else 0.0
            index = first_built([each.pipelines for each, _ in left], target.kind, patience_s, in_turn=True)
            if index is None and doubtful is not None:
                _compile_fallback(*doubtful)
                continue
            each, measurer = left.pop(index or 0)
            try:
                plan(each.region, options, target, measurer)
            except Exception as failure:
                log.debug("%s: it is planned again, which will say why", each.region.name, exc_info=failure)


def _compile_fallback(each: Unplanned, measurer: Measurer) -> None:
    each.doubtful = False
    measurer.compile_fallback()


def _unplanned(regions: Sequence[Region], options: Options, target: Target) -> list[Unplanned]:
    """One of each program that has no plan yet."""
    if not measures(options, target):
        return []
    found: list[Unplanned] = []
    for region in {r.program: r for r in regions if r.rows > 0 and not is_lone(r, options, target)}.values():
        made = (region.program, region.rows, target.hardware, options, turned(region, options))
        if near_plan(region, options, target) is not None or is_cached(*made):
            continue
        try:
            candidates = proposals(*made)
            wanted = shortlist(candidates, options.strategy != "auto", few_rows.most_timed(options))
        except Exception as failure:
            log.debug("%s: nothing to begin; planning it will say why", region.name, exc_info=failure)
            continue
        doubtful = options.strategy == "auto" and _is_doubtful(region, target, candidates, wanted)
        found.append(Unplanned(region, [c.pipeline for c in wanted if c.pipeline is not None], doubtful))
    return found


def _is_doubtful(region: Region, target: Target, candidates: Sequence[Candidate], wanted: Sequence[Candidate]) -> bool:
    """Whether the region is likely to be timed by Inductor as well."""
    fallback = next(c for c in candidates if c.strategy == FALLBACK)
    bound_us = product_bound_us(region.program, region.rows, target.hardware)
    return bool(wanted) and in_doubt(wanted[0].predicted_us or 0.0, fallback, bound_us)
