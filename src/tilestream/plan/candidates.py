"""Ways to run one thing, with what each is predicted to take, what is shown of it and what it took; and which runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilestream.ir.pipeline import Pipeline

FALLBACK = "fallback"


@dataclass(frozen=True)
class Candidate:
    """One way to run something: a pipeline, an operator, or the fallback, which is what runs without us.

    ``operator`` names what runs where that is no pipeline: an operator, or a compiled graph.
    ``predicted_us`` is the cost model's, which ranks; ``simulated_us`` what is shown, where the choice is by that.
    ``rejected`` says why it cannot be chosen; ``detail`` tells candidates of one strategy apart. One that is ``late``
    was rejected only for the moment: its kernel was still being built when others were timed, or memory was short.
    """

    strategy: str
    pipeline: Pipeline | None
    predicted_us: float | None
    measured_us: float | None = None
    rejected: str = ""
    detail: str = ""
    late: bool = False
    simulated_us: float | None = None
    operator: str = ""

    def __post_init__(self) -> None:
        runs = self.pipeline is not None or self.operator or self.strategy == FALLBACK
        if not runs and not self.rejected:
            raise ValueError(f"a refused candidate, {self.name}, has no reason")

    @property
    def name(self) -> str:
        return f"{self.strategy} ({self.detail})" if self.detail else self.strategy

    @property
    def usable(self) -> bool:
        """Whether it may replace the fallback."""
        return self.strategy != FALLBACK and not self.rejected


def prediction_of(c: Candidate) -> float:
    """To compare by: infinite where there is no prediction."""
    return math.inf if c.predicted_us is None else c.predicted_us


def expected_of(c: Candidate) -> float:
    """To compare by where nothing was timed: the time that is shown, where it was asked for, else the prediction."""
    return prediction_of(c) if c.simulated_us is None else c.simulated_us


def time_of(c: Candidate) -> float:
    """To compare by: infinite where it was not timed."""
    return math.inf if c.measured_us is None else c.measured_us


def fallback_of(candidates: Sequence[Candidate]) -> Candidate:
    """The one that always runs: Inductor, a library, or what the graph has."""
    return next(c for c in candidates if c.strategy == FALLBACK)


def known(candidates: Sequence[Candidate]) -> Sequence[Candidate]:
    """Those of which it is known what is shown of them, where it is of any: a prediction is not compared with that."""
    return [c for c in candidates if c.simulated_us is not None] or candidates


def rejections(candidates: Sequence[Candidate]) -> list[str]:
    """Why candidates were rejected, each reason once: ``vertical, spatial (1 layer a stage): too wide``."""
    reasons = dict.fromkeys(c.rejected for c in candidates if c.rejected)
    return [f"{', '.join(c.name for c in candidates if c.rejected == why)}: {why}" for why in reasons]


@dataclass(frozen=True)
class Plan:
    """All candidates of a region, or of what else is chosen, at ``rows`` rows on ``device``, and the one that runs.
    ``rows`` is 0 where they make no difference."""

    region: str
    rows: int
    device: str
    candidates: tuple[Candidate, ...]
    chosen: Candidate

    @property
    def fallback(self) -> Candidate:
        """What runs without us."""
        return fallback_of(self.candidates)

    @property
    def wins(self) -> bool:
        """Whether something else than the fallback runs."""
        return self.chosen.strategy != FALLBACK

    @property
    def gain_us(self) -> float:
        """Microseconds that the choice takes less than the fallback: measured where both were, else predicted; 0 where
        neither is known."""
        mine, theirs = self.chosen, self.fallback
        for a, b in ((mine.measured_us, theirs.measured_us), (mine.predicted_us, theirs.predicted_us)):
            if a is not None and b is not None:
                return b - a
        return 0.0

    def summary(self) -> str:
        """One line: the choice, its time, and the fallback's."""
        where = f"{self.rows} rows on {self.device}" if self.rows else self.device
        return f"{self.chosen.name}, {_told(self.chosen)}; fallback {_told(self.fallback)}; {where}"


def _told(c: Candidate) -> str:
    if c.measured_us is not None:
        return f"{c.measured_us:.1f} us measured"
    us = expected_of(c)
    return f"{us:.1f} us predicted" if math.isfinite(us) else "no prediction"
