"""From a region's program to the pipeline that runs it: candidates by strategy, cost, measurement, choice."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

from tilestream.devices import Device
from tilestream.errors import IRError, PlanError, VerifyError
from tilestream.ir.pipeline import Pipeline
from tilestream.options import Options
from tilestream.plan import few_rows, many_rows
from tilestream.plan.candidates import FALLBACK, Candidate, expected_of, fallback_of, prediction_of, time_of
from tilestream.plan.cost import predict, product_bound_us
from tilestream.plan.finalists import Shown, simulated
from tilestream.plan.made import made_of, once
from tilestream.plan.passes import merge_common_ops, relu_in_product, remove_dead_ops, split_bulk
from tilestream.plan.passes.verified import apply
from tilestream.plan.recipes import IN_PLACE, KERNEL_A_LAYER, Recipe, recipes
from tilestream.plan.shown import pipeline_us
from tilestream.plan.turned import NONE, Turned

log = logging.getLogger(__name__)

UNKNOWN_ROWS = 65_536  # planned for where the number of rows is 0 or not known
MEASURED = 4  # candidates that are timed, besides the fallback
HOPELESS = 1.25  # candidates predicted this many times slower than the best are not timed: of 215 timed regions that
# cost 2 % of time in five, and a limit of 1.5 in four
HOPELESS_SHARED = 1.5  # the same for shared tiles, whose predictions err more
MARGIN = 0.99  # a pipeline must take at most this share of the fallback's time
MARGIN_SHOWN = 0.999  # the same where nothing is timed: two sums of the same kernels differ by rounding
BEYOND = 0.95  # a pipeline that takes at most this share of what the fallback cannot beat needs no comparison
LOST = 2.0  # nothing is timed where the best pipeline is predicted to take this many times what the fallback takes
LONG_US, LOST_LONG = 200.0, 1.05
"""The same where that is longer than ``LONG_US``: in 14 such plans that timed both, no pipeline took less of the
fallback's time than was predicted (1.00 to 1.96 of that), and such candidates are two seconds of a first call."""
SPATIAL = 0.9
"""Where a program fits one SM, stages over SMs are timed only if they are predicted to take this share of the best such
pipeline: in 45 plans that timed both, no such prediction was more than 0.93, and one was the faster, by a kernel that
has lost its spills since."""
DEALT = 0.95
"""Layers in place are not timed where tiles dealt over the grid are predicted to take less than this share of it: in
three plans that timed both they were never the faster, and their kernels take longest to compile."""
SURE = 0.7
"""Nor does one that takes this share of what the fallback is predicted to take: of 22 regions whose fallback was timed
and predicted to take over 20 us, one took less than 0.80 of that (GraphCast's widest: 0.62 to 0.77 in four runs, where
a pipeline takes 1.14); of seven small ones, none less than 0.63."""
LIKELY = 0.75
"""The fallback will be timed where no pipeline is predicted to take less than this share of its prediction: of eleven
plans above it whose fallback was timed one took less than ``SURE``; of four between the two, two did."""


class NotBuiltYet(PlanError):
    """A candidate is not timed, since its kernel is still being built."""


Measure = Callable[[Sequence[Candidate]], list[float | Exception]]
"""Times candidates side by side: microseconds of one call of each, or why one could not be timed."""


@dataclass(frozen=True)
class Plan:
    """All candidates of a region at ``rows`` rows on ``device``, and the one that runs."""

    region: str
    rows: int
    device: str
    candidates: tuple[Candidate, ...]
    chosen: Candidate

    def best_pipeline(self) -> Candidate | None:
        """The legal pipeline that is expected to be fastest, for who never gives way to the fallback; None without."""
        legal = [c for c in self.candidates if c.pipeline is not None and not c.rejected]
        return min(_known(legal), key=expected_of, default=None)


def plan(
    program: Pipeline,
    rows: int,
    device: Device,
    options: Options,
    measure: Measure | None = None,
    turned: Turned = NONE,
    fallback_us: Shown | None = None,
) -> Plan:
    """Plan a region: every pass by name, in order, for every candidate.

    Args:
        program: a one-stage pipeline that holds all ops of the region in topological order.
        rows: rows the plan is made for. Any number runs; 0 or less means not known.
        measure: times the best few by prediction, best first, and the fallback. Without it the simulator's times of
            the best few decide, which are what is shown (``plan.finalists``).
        turned: weights that are copied before each call, which a prediction for few rows counts.
        fallback_us: what is shown of the fallback; the event loop's time of a library's kernels if not given.

    Raises:
        PlanError: a strategy is forced and no pipeline of it is legal; with every reason.
    """
    if rows <= 0:
        measure = None
    planned = rows if rows > 0 else UNKNOWN_ROWS
    candidates = proposals(program, planned, device, options, turned)
    if measure is not None:
        bound_us = 0.0 if options.strategy != "auto" else product_bound_us(program, planned, device)
        most = few_rows.most_timed(options)
        candidates = _measured(candidates, measure, options.strategy != "auto", bound_us, most)
    else:
        candidates = simulated(
            candidates, planned, device, fallback_us or partial(_inductor_us, program, planned, device), turned.us
        )
    chosen = _choose(candidates, program, options, measured=measure is not None)
    made = Plan(program.name, rows, device.name, tuple(candidates), chosen)
    log.info("%s: %s", program.name, summary(made))
    return made


def proposals(
    program: Pipeline, rows: int, device: Device, options: Options, turned: Turned = NONE
) -> tuple[Candidate, ...]:
    """Every candidate with its prediction, refused ones with the reason, and last the fallback. Nothing is timed."""
    made = _proposals(program, rows, device, options, few_rows.in_any_order(options))
    return tuple(_behind(turned, c) for c in made)


def _behind(turned: Turned, c: Candidate) -> Candidate:
    """The candidate with the time of the copies that are made before its call, where it is for few rows."""
    if c.strategy != few_rows.STRATEGY or c.predicted_us is None:
        return c
    return replace(c, predicted_us=c.predicted_us + turned.us)


# A region is asked for twice: when its kernels begin to be compiled, and when it is planned.
@lru_cache(maxsize=256)
def _proposals(
    program: Pipeline, rows: int, device: Device, options: Options, _any_order: bool
) -> tuple[Candidate, ...]:
    """``_any_order`` is a part of the key alone: torch's flag, which recipes look at, may change from call to call."""
    candidates: list[Candidate] = []
    before: dict[Pipeline, Candidate] = {}
    shared = few_rows.recipes(program, rows, device, options) if options.strategy in ("auto", few_rows.STRATEGY) else []
    tiled = many_rows.recipes(program, rows, options)
    for recipe in (*recipes(program, options), *tiled, *shared):
        make = partial(apply, recipe.passes(device, options.queue_depth), program)
        if isinstance(recipe, Recipe):
            make = partial(_by_parts, recipe, program, device, options.queue_depth)
        candidates.append(_candidate(recipe, make, rows, device, before))
    # Every other strategy has recipes for every program. A block on few rows is expected to be shared.
    expected = options.strategy == few_rows.STRATEGY or (options.strategy == "auto" and few_rows.bin_of(program, rows))
    if expected and not shared:
        reason = few_rows.why_none(program, rows, device)
        candidates.append(Candidate(few_rows.STRATEGY, None, None, rejected=reason))
    return (*candidates, on_inductor(program, rows, device))


def shortlist(candidates: Sequence[Candidate], forced: bool = False, most_shared: int = MEASURED) -> list[Candidate]:
    """Those that are timed where times are taken, best predicted first; none where the fallback is far ahead of all.

    A kernel a layer is what a library has, and its time is predicted as a library's: it is a bound for the others, and
    timed only where it is asked for: in 14 plans that timed it, it took 1.2 to 6.8 times what the fastest took.

    Args:
        forced: the fallback is no alternative.
        most_shared: shared tiles that are timed at most.
    """
    legal = sorted((c for c in candidates if c.pipeline is not None), key=prediction_of)
    fallback = fallback_of(candidates)
    shared = [c for c in legal if c.strategy == few_rows.STRATEGY]
    others = [c for c in legal if c.strategy != few_rows.STRATEGY]
    wanted = {id(c) for c in (*shared[:most_shared], *others[:MEASURED])}
    vertical_us = min((prediction_of(c) for c in others if c.strategy == "vertical"), default=math.inf)

    def hopeless(c: Candidate) -> bool:
        limit = HOPELESS_SHARED if c.strategy == few_rows.STRATEGY else HOPELESS
        return prediction_of(c) > limit * prediction_of(legal[0])

    dealt_us = min((prediction_of(c) for c in others if c.detail == many_rows.TiledRecipe.detail), default=math.inf)

    def beaten(c: Candidate) -> bool:
        if c.detail.startswith(IN_PLACE):
            return dealt_us < DEALT * prediction_of(c)
        return c.strategy == KERNEL_A_LAYER or (c.strategy == "spatial" and prediction_of(c) > SPATIAL * vertical_us)

    timed = [c for c in legal if id(c) in wanted and not hopeless(c) and (forced or not beaten(c))]
    limit = LOST_LONG if prediction_of(fallback) > LONG_US else LOST
    lost = bool(timed) and not forced and prediction_of(timed[0]) > limit * prediction_of(fallback)
    return [] if lost else timed


def likely_against(candidates: Sequence[Candidate], bound_us: float) -> bool:
    """Whether the fallback will probably be timed beside a region's candidates, said before any of those is.

    Args:
        bound_us: what the fallback cannot beat.
    """
    wanted = shortlist(candidates)
    fallback = fallback_of(candidates)
    if not wanted or fallback.predicted_us is None:
        return False
    return prediction_of(wanted[0]) > max(BEYOND * bound_us, LIKELY * fallback.predicted_us)


def _candidate(
    recipe: Recipe | many_rows.TiledRecipe | few_rows.SharedRecipe,
    make: Callable[[], Pipeline],
    rows: int,
    device: Device,
    before: dict[Pipeline, Candidate],
) -> Candidate:
    """One recipe's candidate, which joins those ``before`` it unless its pipeline is one of theirs."""
    try:
        pipeline = make()
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
        epilogues: whether products have their ReLU as in our graphs (``relu_in_product``); by itself Inductor leaves it
            to the kernel behind.
    """
    pipeline = _library_kernels(program, device, epilogues)
    return Candidate(FALLBACK, None, None if pipeline is None else predict(pipeline, rows, device).us)


def _inductor_us(program: Pipeline, rows: int, device: Device) -> float | None:
    """The same by the event loop."""
    pipeline = _library_kernels(program, device, True)
    return None if pipeline is None else pipeline_us(pipeline, rows, device)


def _library_kernels(program: Pipeline, device: Device, epilogues: bool) -> Pipeline | None:
    split = partial(split_bulk, device=device, epilogues=False)
    taken = (relu_in_product,) if epilogues else ()
    try:
        return apply((remove_dead_ops, merge_common_ops, *taken, split), program)
    except (VerifyError, IRError) as error:
        log.debug("%s: the fallback has no prediction: %s", program.name, error)
        return None


def _measured(
    candidates: Sequence[Candidate], measure: Measure, forced: bool, bound_us: float, most_shared: int
) -> Sequence[Candidate]:
    """Time the best few, then the fallback, which takes longest to build, unless one of them beats all it could do."""
    if forced:
        return _timed(candidates, shortlist(candidates, forced, most_shared), measure)
    wanted = shortlist(candidates, most_shared=most_shared)
    if not wanted:
        return candidates
    timed = _timed(candidates, wanted, measure)
    if all(c.measured_us is None for c in timed):
        timed = _timed(timed, _stages_over_sms(timed), measure)
    fallback = fallback_of(timed)
    best_us = min((time_of(c) for c in timed), default=math.inf)
    predicted_us = fallback.predicted_us or 0.0
    if best_us > max(BEYOND * bound_us, SURE * predicted_us):
        return _timed(timed, [fallback], measure)
    if best_us <= BEYOND * bound_us:
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
    vertical = _known([c for c in usable if c.strategy == "vertical"])
    key = time_of if timed else expected_of
    limit = expected_of(fallback) if not timed or fallback.measured_us is None else fallback.measured_us
    best = min(timed or vertical or _stages_over_sms(candidates), key=key, default=None)
    if best is None or key(best) > MARGIN * limit:
        return None
    return replace(made, candidates=candidates, chosen=best)


def _timed(candidates: Sequence[Candidate], chosen: Sequence[Candidate], measure: Measure) -> list[Candidate]:
    """``candidates``, those that were chosen with their times, or rejected with the reason why they have none."""
    found = dict(zip((c.name for c in chosen), measure(chosen) if chosen else (), strict=True))
    return [_with(c, found[c.name]) if c.name in found else c for c in candidates]


def _with(candidate: Candidate, found: float | Exception) -> Candidate:
    if not isinstance(found, Exception):
        return replace(candidate, measured_us=found)
    log.warning("%s could not be measured: %s", candidate.name, found)
    return replace(candidate, rejected=f"could not be measured: {found}", late=isinstance(found, NotBuiltYet))


def _choose(candidates: Sequence[Candidate], program: Pipeline, options: Options, measured: bool) -> Candidate:
    """The best of the usable candidates; under ``auto``, the fallback unless one is clearly faster.

    Once timing was tried, only a time counts: a pipeline that could not be timed never beats the fallback. Where none
    was, only what is shown counts, of those of which it is known.
    """
    usable = [c for c in candidates if c.pipeline is not None and not c.rejected]
    fallback = fallback_of(candidates)
    if not usable:
        if options.strategy != "auto":
            reasons = "; ".join(rejections(candidates))
            raise PlanError(
                f"region {program.name!r} has no legal {options.strategy} pipeline: {reasons}",
                "use strategy='auto', which leaves the region to Inductor",
            )
        return fallback
    timed = [c for c in usable if c.measured_us is not None]
    if options.strategy != "auto":
        return min(timed, key=time_of) if timed else min(_known(usable), key=expected_of)
    if measured and not timed:
        return fallback
    if not measured:
        best = min(_known(usable), key=expected_of)
        return best if expected_of(best) <= MARGIN_SHOWN * expected_of(fallback) else fallback
    best, limit = min(timed, key=time_of), fallback.measured_us
    return best if limit is None or time_of(best) <= MARGIN * limit else fallback


def is_faster(ours: Candidate, other: Candidate) -> bool:
    """Whether one of two candidates is clearly the faster: by what was measured of both, else by what is expected. Not
    where nothing is known of the other."""
    if ours.measured_us is not None and other.measured_us is not None:
        return ours.measured_us <= MARGIN * other.measured_us
    other_us = expected_of(other)
    return math.isfinite(other_us) and expected_of(ours) <= MARGIN * other_us


def _known(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Those of which it is known what is shown of them, where it is of any: a prediction is not compared with that."""
    return [c for c in candidates if c.simulated_us is not None] or candidates


def rejections(candidates: Sequence[Candidate]) -> list[str]:
    """Why candidates were rejected, each reason once: ``vertical, spatial (1 layer a stage): too wide``."""
    names: dict[str, list[str]] = {}
    for candidate in candidates:
        if candidate.rejected:
            names.setdefault(candidate.rejected, []).append(candidate.name)
    return [f"{', '.join(who)}: {why}" for why, who in names.items()]


def summary(made: Plan) -> str:
    """One line: the choice, its time, and the fallback's."""
    other = fallback_of(made.candidates)

    def time(c: Candidate) -> str:
        if c.measured_us is not None:
            return f"{c.measured_us:.1f} us measured"
        us = expected_of(c)
        return f"{us:.1f} us predicted" if math.isfinite(us) else "no prediction"

    return f"{made.chosen.name}, {time(made.chosen)}; fallback {time(other)}; {made.rows} rows on {made.device}"
