"""Parts of a compilation: nothing is counted twice."""

from __future__ import annotations

import time

import pytest

from tilestream.run import stopwatch


def test_a_part_that_interrupts_another_is_taken_from_it(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(stopwatch, "_spent", {})
    now = iter((0.0, 1.0, 4.0, 10.0, 20.0, 21.0))
    monkeypatch.setattr(time, "perf_counter", lambda: next(now))
    with stopwatch.timed("outer"), stopwatch.timed("inner"):
        pass
    with pytest.raises(KeyError), stopwatch.timed("inner"):
        raise KeyError
    assert stopwatch.spent() == {"outer": 7.0, "inner": 4.0}
