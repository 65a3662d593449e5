"""Where the seconds of a compilation go, part by part: what ``bench --compile-time`` prints."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator

_spent: dict[str, float] = {}
_running: list[str] = []


@contextlib.contextmanager
def timed(part: str) -> Iterator[None]:
    """Add the time inside to ``part``, and take it from the part that this one interrupts."""
    outer = _running[-1] if _running else None
    _running.append(part)
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds = time.perf_counter() - start
        _running.pop()
        _spent[part] = _spent.get(part, 0.0) + seconds
        if outer is not None:
            _spent[outer] = _spent.get(outer, 0.0) - seconds


def spent() -> dict[str, float]:
    """Seconds of each part so far in this process, none counted twice."""
    return dict(_spent)
