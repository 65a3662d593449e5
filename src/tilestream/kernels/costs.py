"""What a launch asks for, and the one function that makes seconds of that: every family of kernels only counts.

Rates are the device's, or regression coefficients (``kernels.coefficients``) that were taken to the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

SHARING = 4.0
"""Exponent of a sum of what overlaps but not wholly: of two equal parts, 1.19 times one. It stays above the longest.
Chosen with the constants of ``devices/device.py``, by README's cases (benchmarks/fit/cost_truth.py)."""

Together = Callable[[Sequence[float]], float]
"""Seconds of parts from those of each."""


@dataclass(frozen=True)
class Amount:
    """``amount`` bytes, FLOPs or instructions of a resource that does ``per_s`` of them a second; or, at a rate of 1,
    seconds of waits that nothing shortens."""

    name: str
    amount: float
    per_s: float = 1.0

    @property
    def seconds(self) -> float:
        return self.amount / self.per_s

    @property
    def limit(self) -> str:
        return self.name


@dataclass(frozen=True)
class Counts:
    """Parts of a launch, or of a part of one, and how they run: one after another, or side by side; ``times`` over.

    ``told``: what the limit of its longest part is called as its own.
    """

    name: str
    parts: tuple[Counts | Amount, ...]
    together: Together = sum
    times: float = 1.0
    told: str = "{}"

    @cached_property
    def seconds(self) -> float:
        """Predicted: this is where counts become time."""
        return self.times * self.together([part.seconds for part in self.parts])

    @property
    def us(self) -> float:
        return self.seconds * 1e6

    @property
    def limit(self) -> str:
        """The resource or the wait that takes longest, in the longest of the parts."""
        return self.told.format(max(self.parts, key=lambda part: part.seconds).limit)

    def __getitem__(self, name: str) -> Counts | Amount:
        """The part of that name, at any depth; raises ``KeyError``."""
        for part in self.parts:
            if part.name == name:
                return part
            if isinstance(part, Counts) and name in part:
                return part[name]
        raise KeyError(name)

    def __contains__(self, name: str) -> bool:
        return any(part.name == name or (isinstance(part, Counts) and name in part) for part in self.parts)


def shared(seconds: Sequence[float], power: float) -> float:
    """Of parts side by side that get in each other's way: more than the longest, less than the sum."""
    longest = max(seconds)
    if longest <= 0:
        return 0.0
    return longest * sum((s / longest) ** power for s in seconds) ** (1 / power)


def hidden(seconds: Sequence[float], share: float) -> float:
    """Of parts side by side of which only a ``share`` of all but the longest hides behind it."""
    longest = max(seconds)
    return longest + (1 - share) * (sum(seconds) - longest)


beside: Together = partial(shared, power=SHARING)
"""Of parts side by side that overlap but not wholly."""


@dataclass(frozen=True)
class ClosedForm:
    """A family whose time is that of its counts as a whole, and not events. Its CTAs wait for each other in ways that
    the event loop does not know (a tile shared by columns, units dealt over the grid, sums that meet in the L2), and
    were measured as wholes.

    ``name`` of the kernels, in plural; mean absolute ``error`` of their times on an H200, measured on ``kernels``
    (docs/cost-model.md has where).
    """

    name: str
    error: float
    kernels: str
