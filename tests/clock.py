"""A ``planner.Measure`` without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

from tilestream.planner import Candidate


class Clock:
    """Stands for the GPU: microseconds by strategy or by a candidate's whole name, or an error to raise."""

    def __init__(self, **us: float | Exception) -> None:
        self.us = us
        self.asked: list[str] = []
        self.built: list[str] = []

    def build(self, candidates: Sequence[Candidate]) -> None:
        self.built += [c.name for c in candidates]

    def __call__(self, candidate: Candidate) -> float:
        self.asked.append(candidate.name)
        found = self.us.get(candidate.name, self.us.get(candidate.strategy, 1000.0))
        if isinstance(found, Exception):
            raise found
        return found
