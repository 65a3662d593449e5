"""What is said of the tests before the first of them runs, and the order in which they come."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import pytest

SKIPPED = pytest.StashKey[bool]()
"""Whether the machine lacks what a test needs."""
WHOLE_SUITE = 1000
"""From so many tests on, the first line says how many there are: fewer are a choice of the user's."""
GROUP = "@gpu"
"""How xdist ends the names of tests that take turns at the GPU."""


def ordered(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Those first for which a process would wait at the end: what many tests make in common is no less a load than one
    that takes long. Those last that are skipped: a screen of them would say nothing of how the rest goes."""

    def place(item: pytest.Item) -> int:
        if item.stash.get(SKIPPED, False):
            return 2
        return 0 if item.get_closest_marker("early") or item.get_closest_marker("xdist_group") else 1

    return sorted(items, key=place)


def left_out(items: Sequence[pytest.Item]) -> list[pytest.Item]:
    """Of tests with the marker ``every(n)`` all cases but every n-th, the first among those that stay."""
    seen: Counter[str] = Counter()
    found = []
    for item in items:
        if (marker := item.get_closest_marker("every")) is not None:
            name = item.nodeid.split("[")[0]
            if seen[name] % marker.args[0]:
                found.append(item)
            seen[name] += 1
    return found


def first_line(tests: int, on_gpu: int, lacking: str) -> str:
    """How many tests there are, how many of them are skipped, and how long it takes.

    Args:
        on_gpu: how many need a GPU.
        lacking: why there is none that they can use; empty if there is one.
    """
    skipped = f"{on_gpu:,} of them need a GPU and are skipped, at the end ({lacking})"
    runs = f"{on_gpu:,} of them on the GPU"
    return f"{tests:,} tests, {skipped if lacking else runs}; about 17 minutes on 2 cores"
