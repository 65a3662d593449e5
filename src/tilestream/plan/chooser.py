"""Which of several ways to compute the same runs: predicted or timed, decided by one rule, kept in one place.

A region's kernel, a backward chain, a launch of weight gradients, an attention, an interaction, a tail and a whole
graph are all asked as a ``Question`` and answered by a ``Plan``. What times candidates is given (``run.timer``), since
nothing here runs. The margins are in ``plan.margins``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from tilestream.devices import Device
from tilestream.errors import PlanError
from tilestream.options import Options
from tilestream.plan import margins
from tilestream.plan.cache import PlanCache, versions
from tilestream.plan.candidates import FALLBACK, Candidate, Plan, expected_of, fallback_of, known, rejections, time_of

log = logging.getLogger(__name__)


class NotTimedNow(PlanError):
    """A candidate is not timed here and now: its kernel is still being built, or memory is short."""


Measure = Callable[[Sequence[Candidate]], list[float | Exception]]
"""Times candidates side by side: microseconds of one call of each, or why one could not be timed."""

Time = Callable[[Sequence[Candidate], Sequence[Candidate]], Sequence[Candidate]]
"""Of all candidates, those that are to be timed: all again, those with their times, or rejected with the reason."""


def side_by_side(candidates: Sequence[Candidate], time: Time) -> Sequence[Candidate]:
    """Time all that may run, the fallback among them, unless that is all there is."""
    usable = [c for c in candidates if c.usable]
    return time(candidates, [*usable, fallback_of(candidates)] if usable else ())


@dataclass(frozen=True)
class Question:
    """Several ways to compute the same, of which one is to run.

    Args:
        name: of what is chosen, in logs and errors.
        rows: that it is chosen for, 0 where they make no difference.
        decides: all that times depend on besides the device and what compiles, as JSON has it: what a plan is kept by.
        propose: makes the candidates with their predictions, the fallback last.
        forced: the fallback is no alternative.
        refusal, remedy: what the error says where something is forced and nothing of it can run.
        margin: the share of the fallback's time that what replaces it takes at most, where both are timed; None as
            for most.
        order: times candidates, given what does: which of them, and which beside which.
        show: adds what is shown of candidates where none is timed.
    """

    name: str
    rows: int
    device: Device
    decides: Callable[[], Any]
    propose: Callable[[], Sequence[Candidate]]
    forced: bool = False
    refusal: str = "nothing can run"
    remedy: str = ""
    margin: float | None = None
    order: Callable[[Sequence[Candidate], Time], Sequence[Candidate]] = side_by_side
    show: Callable[[Sequence[Candidate]], Sequence[Candidate]] = tuple

    def key(self, measured: bool) -> str:
        """What a plan is kept by, measured or predicted: a sha256."""
        text = [self.decides(), asdict(self.device), self.forced, measured, versions()]
        return hashlib.sha256(json.dumps(text, sort_keys=True).encode()).hexdigest()


def alternative(
    operator: str,
    kind: Any,
    device: Device,
    predicted_us: tuple[float | None, float | None] = (None, None),
    forced: bool = False,
) -> Question:
    """Whether an operator takes the place of what a graph has.

    Args:
        kind: a frozen dataclass of all that decides how long both take.
        predicted_us: of both, where it is known.
    """

    def propose() -> tuple[Candidate, ...]:
        ours_us, present_us = predicted_us
        return Candidate(operator, None, ours_us, operator=operator), Candidate(FALLBACK, None, present_us)

    return Question(operator, 0, device, lambda: [operator, asdict(kind)], propose, forced)


_chosen: dict[str, Plan] = {}


def choose(question: Question, options: Options, measure: Measure | None = None) -> Plan:
    """The answer: from this process, from the disk, or made now and kept; with ``cache=False`` in the process alone.

    A plan that was made while a candidate could not be timed, on a busy machine, serves this process alone: the next
    one may find its kernel built. A folder that cannot be written is announced once.

    Raises:
        PlanError: as ``decide``.
    """
    name = question.key(measure is not None)
    found = _kept(name, options)
    if found is None:
        found = _chosen[name] = decide(question, measure)
        if options.cache and not any(c.late for c in found.candidates):
            PlanCache(options.cache_folder).store(name, found)
    return found


def kept(question: Question, options: Options, measured: bool) -> Plan | None:
    """The answer, if this process or the disk has it."""
    return _kept(question.key(measured), options)


def _kept(name: str, options: Options) -> Plan | None:
    if name not in _chosen and options.cache and (found := PlanCache(options.cache_folder).load(name)) is not None:
        _chosen[name] = found
    return _chosen.get(name)


def forget() -> None:
    """Let this process choose anew, or ask the disk."""
    _chosen.clear()


def decide(question: Question, measure: Measure | None = None) -> Plan:
    """The answer, made now: by what ``measure`` finds, else by what is shown, else predicted.

    Raises:
        PlanError: something is forced and nothing of it can run; with every reason.
    """
    candidates = tuple(question.propose())
    if measure is None:
        candidates = question.show(candidates)
    else:
        candidates = question.order(candidates, lambda every, wanted: _timed(every, wanted, measure))
    chosen = _best(question, candidates, measured=measure is not None)
    made = Plan(question.name, question.rows, question.device.name, tuple(candidates), chosen)
    log.info("%s: %s", question.name, made.summary())
    return made


def _timed(candidates: Sequence[Candidate], wanted: Sequence[Candidate], measure: Measure) -> Sequence[Candidate]:
    """``candidates``, those that are ``wanted`` with their times, or rejected with the reason why they have none."""
    found = dict(zip((c.name for c in wanted), measure(wanted) if wanted else (), strict=True))
    return [_with(c, found[c.name]) if c.name in found else c for c in candidates]


def _with(candidate: Candidate, found: float | Exception) -> Candidate:
    if not isinstance(found, Exception):
        return replace(candidate, measured_us=found)
    log.warning("%s could not be measured: %s", candidate.name, found)
    return replace(candidate, rejected=f"could not be measured: {found}", late=isinstance(found, NotTimedNow))


def _best(question: Question, candidates: Sequence[Candidate], measured: bool) -> Candidate:
    """The best of the usable candidates; the fallback unless one is clearly faster, or something is forced.

    Once timing was tried, only a time counts: what could not be timed never beats the fallback, unless that is
    rejected. Where none was, only what is shown counts, of those of which it is known.
    """
    usable = [c for c in candidates if c.usable]
    fallback = fallback_of(candidates)
    if not usable and not question.forced:
        return fallback
    if not usable:
        raise PlanError(f"{question.refusal}: {'; '.join(rejections(candidates))}", question.remedy)
    timed = [c for c in usable if c.measured_us is not None]
    if timed:
        best, limit = min(timed, key=time_of), fallback.measured_us
        margin = margins.MARGIN if question.margin is None else question.margin
        wins = limit is None or time_of(best) <= margin * limit
    else:
        best = min(known(usable), key=expected_of)
        wins = bool(fallback.rejected) if measured else _is_shown_faster(best, fallback)
    return best if wins or question.forced else fallback


def _is_shown_faster(best: Candidate, fallback: Candidate) -> bool:
    """Whether a candidate is faster than the fallback by what is shown of both, or else predicted."""
    us = expected_of(best)
    return math.isfinite(us) and us <= margins.MARGIN_SHOWN * expected_of(fallback)
