"""From a region's program to the pipeline that runs it: candidates by strategy, cost, measurement, choice."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from typing import Any

from tilestream.devices import Device
from tilestream.errors import IRError, VerifyError
from tilestream.ir.pipeline import TILE_ROWS, Pipeline
from tilestream.ir.serialise import pipeline_to_json
from tilestream.options import Options
from tilestream.plan import few_rows, margins
from tilestream.plan.candidates import (
    FALLBACK,
    Candidate,
    Plan,
    expected_of,
    fallback_of,
    known,
    prediction_of,
    time_of,
)
from tilestream.plan.chooser import Measure, Question, Time, decide
from tilestream.plan.cost import predict, product_bound_us
from tilestream.plan.finalists import Shown, simulated
from tilestream.plan.passes.activation_in_product import activation_in_product
from tilestream.plan.passes.cleaning import merge_common_ops, remove_dead_ops
from tilestream.plan.passes.cuts import split_bulk
from tilestream.plan.passes.verified import apply
from tilestream.plan.recipes import IN_PLACE, KERNEL_A_LAYER, TILED, Recipe, recipes, tiled
from tilestream.plan.shown import pipeline_us
from tilestream.plan.turned import NONE, Turned, lying, reads_them

log = logging.getLogger(__name__)

UNKNOWN_ROWS = 65_536  # planned for where the number of rows is 0 or not known


def plan(
    program: Pipeline,
    rows: int,
    device: Device,
    options: Options,
    measure: Measure | None = None,
    turned: Turned = NONE,
    fallback_us: Shown | None = None,
) -> Plan:
    """The plan of a region, made now and not kept: ``chooser.decide`` of its ``question``.

    Args:
        measure: times candidates; not asked where the rows are not known.

    Raises:
        PlanError: a strategy is forced and no pipeline of it is legal; with every reason.
    """
    asked = question(program, rows, device, options, turned, fallback_us)
    return decide(asked, measure if rows > 0 else None)


def question(
    program: Pipeline,
    rows: int,
    device: Device,
    options: Options,
    turned: Turned = NONE,
    fallback_us: Shown | None = None,
) -> Question:
    """Which kernel runs a region: every pass by name, in order, for every candidate.

    A plan made for one number of rows serves its whole ``bucket``.

    Args:
        program: a one-stage pipeline that holds all ops of the region in topological order.
        rows: rows the plan is made for. Any number runs; 0 or less means not known.
        turned: weights that are copied before each call, which a prediction for few rows counts.
        fallback_us: what is shown of the fallback; the event loop's time of a library's kernels if not given.
    """
    planned = rows if rows > 0 else UNKNOWN_ROWS
    of_strategy = "" if options.strategy == "auto" else f"{options.strategy} "
    forced = bool(of_strategy) or options.target == "reference"

    def order(candidates: Sequence[Candidate], time: Time) -> Sequence[Candidate]:
        if forced:
            return time(candidates, shortlist(candidates, True, few_rows.most_timed(options)))
        return _timed(candidates, time, product_bound_us(program, planned, device), few_rows.most_timed(options))

    def show(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
        """The simulator's times of the best few, which are what is shown (``plan.finalists``)."""
        told = fallback_us or partial(_inductor_us, program, planned, device)
        return simulated(candidates, planned, device, told, turned.us)

    return Question(
        program.name, rows, device, partial(_decides, program, rows, options, turned),
        propose=lambda: proposals(program, planned, device, options, turned), forced=forced,
        refusal=f"region {program.name!r} has no legal {of_strategy}pipeline",
        remedy="use strategy='auto', which leaves the region to Inductor" if of_strategy else "allow another device",
        order=order, show=show,
    )  # fmt: skip


def _decides(program: Pipeline, rows: int, options: Options, turned: Turned) -> dict[str, Any]:
    """All that a region's plan depends on."""
    few = few_rows.bin_of(program, rows)
    return {
        "program": pipeline_to_json(program, sources=False),
        "rows": few or bucket(rows),
        "options": {"strategy": options.strategy, "queue_depth": options.queue_depth, "target": options.target},
        "effort": options.effort,
        "in_any_order": few_rows.in_any_order(options),
        "turned": (turned.weights, turned.as_they_lie) if few or turned.as_they_lie else (),
        "by_cluster": few > 0 and few_rows.by_cluster(options),
    }


def bucket(rows: int) -> int:
    """The least power of two of tiles that holds ``rows``, in rows; 0 if not known. One plan a bucket."""
    if rows <= 0:
        return 0
    tiles = -(-rows // TILE_ROWS)
    return TILE_ROWS * (1 << (tiles - 1).bit_length())


def proposals(
    program: Pipeline, rows: int, device: Device, options: Options, turned: Turned = NONE
) -> tuple[Candidate, ...]:
    """Every candidate with its prediction, refused ones with the reason, and last the fallback. Nothing is timed."""
    made = _proposals(program, rows, device, options, few_rows.in_any_order(options))
    if turned.as_they_lie:
        own = _proposals(lying(program, turned.weights), rows, device, options, few_rows.in_any_order(options))
        told = (replace(c, detail=f"{c.detail}, weights as they lie") for c in own if c.pipeline is not None)
        made = (*made[:-1], *told, made[-1])
    return tuple(_behind(turned, c) for c in made)


def _behind(turned: Turned, c: Candidate) -> Candidate:
    """The candidate with the time of the copies that are made before its call, where it is for few rows."""
    if c.strategy != few_rows.STRATEGY or c.predicted_us is None or reads_them(c):
        return c
    return replace(c, predicted_us=c.predicted_us + turned.us)


# A region is asked for twice: when its kernels begin to be compiled, and when it is planned.
@lru_cache(maxsize=256)
def _proposals(
    program: Pipeline, rows: int, device: Device, options: Options, _any_order: bool
) -> tuple[Candidate, ...]:
    """``_any_order`` is a part of the key alone: torch's flag, which recipes look at, may change from call to call."""
    before: dict[Pipeline, Candidate] = {}
    shared = few_rows.recipes(program, rows, device, options) if options.strategy in ("auto", few_rows.STRATEGY) else []
    streams = [] if any(t.by_columns for t in program.tensors) else recipes(program, options, device)
    every = (*streams, *tiled(program, rows, options), *shared)
    candidates = [_candidate(recipe, program, rows, device, options.queue_depth, before) for recipe in every]
    # Every other strategy has recipes for every program. A block on few rows is expected to be shared.
    expected = options.strategy == few_rows.STRATEGY or (options.strategy == "auto" and few_rows.bin_of(program, rows))
    if expected and not shared:
        reason = few_rows.why_none(program, rows, device)
        candidates.append(Candidate(few_rows.STRATEGY, None, None, rejected=reason))
    return (*candidates, on_inductor(program, rows, device))


def shortlist(
    candidates: Sequence[Candidate], forced: bool = False, most: tuple[int, int] = (margins.MEASURED, margins.MEASURED)
) -> list[Candidate]:
    """Those that are timed where times are taken, best predicted first; none where the fallback is far ahead of all.

    A kernel a layer is what a library has, and its time is predicted as a library's: it is a bound for the others, and
    timed only where it is asked for: in 14 plans that timed it, it took 1.2 to 6.8 times what the fastest took.

    Args:
        forced: the fallback is no alternative.
        most: shared tiles, and others, that are timed at most.
    """
    legal = sorted((c for c in candidates if c.pipeline is not None), key=prediction_of)
    fallback = fallback_of(candidates)
    shared = [c for c in legal if c.strategy == few_rows.STRATEGY]
    others = [c for c in legal if c.strategy != few_rows.STRATEGY]
    wanted = {id(c) for c in (*shared[: most[0]], *others[: most[1]])}
    vertical_us = min((prediction_of(c) for c in others if c.strategy == "vertical"), default=math.inf)

    def hopeless(c: Candidate) -> bool:
        limit = margins.HOPELESS_SHARED if c.strategy == few_rows.STRATEGY else margins.HOPELESS
        return prediction_of(c) > limit * prediction_of(legal[0])

    dealt_us = min((prediction_of(c) for c in others if c.detail == TILED.detail), default=math.inf)

    def beaten(c: Candidate) -> bool:
        if c.detail.startswith(IN_PLACE):
            return dealt_us < margins.DEALT * prediction_of(c)
        return c.strategy == KERNEL_A_LAYER or (
            c.strategy == "spatial" and prediction_of(c) > margins.SPATIAL * vertical_us
        )

    timed = [c for c in legal if id(c) in wanted and not hopeless(c) and (forced or not beaten(c))]
    limit = margins.LOST_LONG if prediction_of(fallback) > margins.LONG_US else margins.LOST
    limit = 1.0 if most[1] == 1 else limit  # by prediction alone
    lost = bool(timed) and not forced and prediction_of(timed[0]) > limit * prediction_of(fallback)
    return [] if lost else timed


def likely_against(candidates: Sequence[Candidate], bound_us: float, most: tuple[int, int]) -> bool:
    """Whether the fallback will probably be timed beside a region's candidates, said before any of those is.

    Args:
        bound_us: what the fallback cannot beat.
        most: as of ``shortlist``.
    """
    wanted = shortlist(candidates, most=most)
    fallback = fallback_of(candidates)
    if not wanted or fallback.predicted_us is None:
        return False
    return prediction_of(wanted[0]) > max(margins.BEYOND * bound_us, margins.LIKELY * fallback.predicted_us)


def _candidate(
    recipe: Recipe,
    program: Pipeline,
    rows: int,
    device: Device,
    queue_depth: int | None,
    before: dict[Pipeline, Candidate],
) -> Candidate:
    """One recipe's candidate, which joins those ``before`` it unless its pipeline is one of theirs."""
    try:
        pipeline = _by_parts(recipe, program, device, queue_depth)
    except (VerifyError, IRError) as error:
        return Candidate(recipe.strategy, None, None, rejected=error.cause, detail=recipe.detail)
    if (twin := before.get(pipeline)) is not None:
        return Candidate(recipe.strategy, None, None, rejected=f"the same as {twin.name}", detail=recipe.detail)
    made = Candidate(recipe.strategy, pipeline, predict(pipeline, rows, device).us, detail=recipe.detail)
    before[pipeline] = made
    return made


def _by_parts(recipe: Recipe, program: Pipeline, device: Device, queue_depth: int | None) -> Pipeline:
    """``recipe``'s passes, as far as none has run them for another number of rows, or its cut for another recipe."""
    made = made_of(program, device)
    cut = once(made, recipe.cut_key, lambda: apply(recipe.cut(device), program))
    behind = (recipe.cut_key, recipe.steps, recipe.dims, recipe.in_flight, recipe.resident, queue_depth)
    return once(made, behind, lambda: apply(recipe.behind_cut(device, queue_depth), cut))


def on_inductor(program: Pipeline, rows: int, device: Device, epilogues: bool = True) -> Candidate:
    """Inductor, predicted as library kernels: one a linear, and one for all that lies between two of them.

    Args:
        epilogues: whether products have their activation as in our graphs (``activation_in_product``); by itself
            Inductor leaves it to the kernel behind.
    """
    pipeline = _library_kernels(program, device, epilogues)
    return Candidate(FALLBACK, None, None if pipeline is None else predict(pipeline, rows, device).us)


def _inductor_us(program: Pipeline, rows: int, device: Device) -> float | None:
    """The same by the event loop."""
    pipeline = _library_kernels(program, device, True)
    return None if pipeline is None else pipeline_us(pipeline, rows, device)


def _library_kernels(program: Pipeline, device: Device, epilogues: bool) -> Pipeline | None:
    split = partial(split_bulk, device=device, epilogues=False)
    taken = (activation_in_product,) if epilogues else ()
    try:
        return apply((remove_dead_ops, merge_common_ops, *taken, split), program)
    except (VerifyError, IRError) as error:
        log.debug("%s: the fallback has no prediction: %s", program.name, error)
        return None


def _timed(candidates: Sequence[Candidate], time: Time, bound_us: float, most: tuple[int, int]) -> Sequence[Candidate]:
    """Time the best few, then the fallback, which takes longest to build, unless one of them beats all it could do."""
    wanted = shortlist(candidates, most=most)
    if not wanted:
        return candidates
    timed = time(candidates, wanted)
    if all(c.measured_us is None for c in timed):
        timed = time(timed, _stages_over_sms(timed))
    fallback = fallback_of(timed)
    best_us = min((time_of(c) for c in timed), default=math.inf)
    predicted_us = fallback.predicted_us or 0.0
    if best_us > max(margins.BEYOND * bound_us, margins.SURE * predicted_us):
        return time(timed, [fallback])
    if best_us <= margins.BEYOND * bound_us:
        why = f"not timed: its matrix products alone take {bound_us:.0f} us, each a kernel of its own"
    else:
        why = f"not timed: a pipeline takes {best_us:.0f} us, far less than it is predicted to take"
    return [replace(c, rejected=why) if c is fallback else c for c in timed]


def _stages_over_sms(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The best spatial candidate that is left, if any: its stages are smaller kernels than those that failed."""
    left = (c for c in candidates if c.strategy == "spatial" and c.pipeline is not None and not c.rejected)
    best = min(left, key=prediction_of, default=None)
    return [] if best is None else [best]


def without(made: Plan, reason: str) -> Plan | None:
    """The plan where what it chose cannot be built: what was timed counts first, then the best vertical pipeline by
    prediction, and the best spatial one where none is left. None where the fallback is as fast.

    Args:
        reason: why it cannot be, for the candidate.
    """
    candidates = tuple(replace(c, rejected=reason) if c == made.chosen else c for c in made.candidates)
    fallback = fallback_of(candidates)
    usable = [c for c in candidates if c.pipeline is not None and not c.rejected]
    timed = [c for c in usable if c.measured_us is not None]
    vertical = known([c for c in usable if c.strategy == "vertical"])
    key = time_of if timed else expected_of
    limit = expected_of(fallback) if not timed or fallback.measured_us is None else fallback.measured_us
    best = min(timed or vertical or _stages_over_sms(candidates), key=key, default=None)
    if best is None or key(best) > margins.MARGIN * limit:
        return None
    return replace(made, candidates=candidates, chosen=best)


STRATEGY = "vertical"


Made = dict[Hashable, Pipeline | VerifyError | IRError]


@lru_cache(maxsize=64)
def made_of(_program: Pipeline, _device: Device) -> Made:
    """What recipes make of a program on a device, or why they cannot; filled by ``once``. Rows are no part of it: a
    model's equal layers are planned at as many numbers of rows as it has kinds of edges and nodes."""
    return {}


def once(made: Made, key: Hashable, make: Callable[[], Pipeline]) -> Pipeline:
    """``make``'s pipeline; it is called once for a key, and why it raised is kept too."""
    if key not in made:
        try:
            made[key] = make()
        except (VerifyError, IRError) as error:
            made[key] = error.with_traceback(None)
    found = made[key]
    if not isinstance(found, Pipeline):
        # A new one: an error that is kept and raised keeps every frame above it, with all that a caller holds there.
        raise type(found)(found.cause, found.remedy)
    return found
