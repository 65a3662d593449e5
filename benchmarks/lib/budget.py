"""A run that ends in time: steps are begun only where the longest of their kind so far would still end within it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field


@dataclass
class Budget:
    """``seconds`` from now on, by ``clock``.

    A step that runs is never cut short, so ``guess_s``, which counts until one of its kind was seen, should be high.
    """

    seconds: float
    clock: Callable[[], float] = time.monotonic
    longest_s: dict[str, float] = field(default_factory=dict)
    start_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.start_s = self.clock()

    @property
    def left_s(self) -> float:
        return self.seconds - (self.clock() - self.start_s)

    def affords(self, kind: str, guess_s: float) -> bool:
        """Whether another step of this kind would end in time."""
        return self.longest_s.get(kind, guess_s) <= self.left_s

    @contextlib.contextmanager
    def step(self, kind: str) -> Iterator[None]:
        """A step of this kind; how long it takes is kept, whether it fails or not."""
        start_s = self.clock()
        try:
            yield
        finally:
            self.longest_s[kind] = max(self.longest_s.get(kind, 0.0), self.clock() - start_s)
