"""A ``chooser.Measure`` without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from tilestream.errors import TilestreamError
from tilestream.plan.candidates import Candidate


class Clock:
    """Stands for the GPU: microseconds by strategy or by a candidate's whole name, or an error to raise."""

    def __init__(self, **us: float | Exception) -> None:
        self.us = us
        self.asked: list[str] = []

    def __call__(self, candidates: Sequence[Candidate]) -> list[float | Exception]:
        return [self._us(c) for c in candidates]

    def _us(self, candidate: Candidate) -> float | Exception:
        self.asked.append(candidate.name)
        found = self.us.get(candidate.name, self.us.get(candidate.strategy, 1000.0))
        if isinstance(found, Exception) and not isinstance(found, TilestreamError):
            raise found
        return found
