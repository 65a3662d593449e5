"""One way to run a region, with what it is predicted to take, what is shown of it, and what it took."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tilestream.ir.pipeline import Pipeline

FALLBACK = "fallback"


@dataclass(frozen=True)
class Candidate:
    """One way to run a region. ``pipeline`` None is the fallback, Inductor.

    ``predicted_us`` is the cost model's, which ranks; ``simulated_us`` what is shown, where the choice is by that.
    ``rejected`` says why it cannot be chosen; ``detail`` tells candidates of one strategy apart. One that is ``late``
    was rejected only because its kernel was still being built when all others were timed.
    """

    strategy: str
    pipeline: Pipeline | None
    predicted_us: float | None
    measured_us: float | None = None
    rejected: str = ""
    detail: str = ""
    late: bool = False
    simulated_us: float | None = None

    def __post_init__(self) -> None:
        if self.pipeline is None and self.strategy != FALLBACK and not self.rejected:
            raise ValueError(f"a refused candidate, {self.name}, has no reason")

    @property
    def name(self) -> str:
        return f"{self.strategy} ({self.detail})" if self.detail else self.strategy


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
    """The one that every region has: Inductor."""
    return next(c for c in candidates if c.strategy == FALLBACK)
