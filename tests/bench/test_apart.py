"""Benchmarks whose arms are processes of their own: who is timed when."""

from __future__ import annotations

import importlib
from multiprocessing.connection import Connection, Pipe
from threading import Thread
from types import ModuleType

import pytest


@pytest.fixture
def apart() -> ModuleType:
    return importlib.import_module("benchmarks.lib.apart")


def test_arms_take_turns(apart: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """No replay begins before that of another process is over, every round begins with another arm, and what is
    replayed while clocks settle does not count."""
    now = [0.0]
    monkeypatch.setattr(apart.time, "perf_counter", lambda: now[0])
    monkeypatch.setattr(apart, "ROUNDS", 3)
    asked: list[str] = []
    running: list[str] = []

    def arm(name: str, end: Connection) -> None:
        while (call := end.recv()) is not None:
            assert call == "us" and not running
            running.append(name)
            asked.append(name)
            now[0] += 0.25
            us = 1000.0 if now[0] <= apart.SETTLE_S else {"a": 10.0, "b": 20.0}[name] + len(asked)
            running.pop()
            end.send(us)

    ends = {}
    for name in ("a", "b"):
        ends[name], theirs = Pipe()
        Thread(target=arm, args=(name, theirs), daemon=True).start()
    found = apart.in_turn(ends, "us")
    for end in ends.values():
        end.send(None)
    assert asked == ["a", "b", "b", "a"] + ["a", "b", "b", "a", "a", "b"]
    assert found == {"a": 10.0 + 8, "b": 20.0 + 7}


def test_a_process_says_what_it_made_and_replays(apart: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    from tilestream.run import timing

    monkeypatch.setattr(timing, "capture", lambda call: timing.Captured(call(), None, 4, call))  # type: ignore[arg-type]
    monkeypatch.setattr(timing, "replay_us", lambda graph: 100.0 * graph)
    ours, theirs = Pipe()
    for word in ("us", "gradients_us", None):
        ours.send(word)
    apart.of_arm(
        theirs, lambda arm, case: ({"row": (arm, case)}, {"us": lambda: 1, "gradients_us": lambda: 2}), "x", ("y",)
    )
    assert ours.recv() == {"row": ("x", "y"), "calls": ["us", "gradients_us"]}
    assert [ours.recv(), ours.recv()] == [25.0, 50.0]
