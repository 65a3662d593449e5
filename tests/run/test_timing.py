"""When a GPU is taken to have reached its clocks: on a clock of the test's own."""

from __future__ import annotations

import gc
from itertools import cycle
from typing import Any

import pytest
import torch

from tilestream.run import timing
from tilestream.run.timing import FEW_ROUNDS, ROUNDS, Captured, interleaved, to_choose, uncollected, warm_up


class Gpu:
    """Replays take ``us`` microseconds; twice that at first, and less and less until ``cold_s`` seconds are worked."""

    def __init__(self, us: float, cold_s: float) -> None:
        self.us, self.cold_s, self.whole_s, self.now_s, self.replays = us, cold_s, cold_s, 0.0, 0

    def replay(self) -> None:
        self.replays += 1
        took_s = self.us * 1e-6 * (1 + max(0.0, self.cold_s) / self.whole_s)
        self.now_s += took_s
        self.cold_s -= took_s


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    made = Gpu(1000.0, 0.6)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: made.now_s)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(timing, "_timed_until_s", [-1e9])
    monkeypatch.setattr(timing, "replay_us", lambda graph: graph.replay() or made.us)
    return made


def test_work_goes_on_until_the_clocks_are_up(gpu: Gpu) -> None:
    graph: Any = gpu
    warm_up([graph])
    assert gpu.cold_s <= 0.1 * gpu.whole_s and gpu.now_s < timing.MOST_S


def test_clocks_that_never_settle_end_the_work(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    graph: Any = gpu
    original = gpu.replay

    def replay() -> None:
        original()
        gpu.us *= 0.999

    monkeypatch.setattr(gpu, "replay", replay)
    warm_up([graph])
    assert gpu.now_s < timing.MOST_S + 3 * timing.STRETCH_S


def test_who_was_timed_just_before_is_warm(gpu: Gpu) -> None:
    graph: Any = gpu
    arm = Captured(graph, None, 1, lambda: None)
    interleaved([arm], 3)
    before = gpu.replays
    interleaved([arm], 3)
    assert gpu.replays == before + 1 + 3
    gpu.now_s += 2 * timing.KEPT_S
    interleaved([arm], 3)
    assert gpu.replays >= before + 4 + 3 + 2 * timing.STRETCH_S / (gpu.us * 1e-6)


def test_a_call_takes_at_most_what_the_fastest_of_a_few_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the first, which makes what later ones find."""
    now_ms, calls = [0.0], iter([900.0, 9.0, 7.0, *[5.0] * (FEW_ROUNDS - 3), 6.0])

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            self.at_ms = -1.0

        def record(self) -> None:
            self.at_ms = now_ms[0]

        def synchronize(self) -> None:
            assert self.at_ms == now_ms[0]

        def elapsed_time(self, end: Any) -> float:
            return end.at_ms - self.at_ms

    monkeypatch.setattr(torch.cuda, "Event", Event)
    assert timing.at_most_us(lambda: now_ms.__setitem__(0, now_ms[0] + next(calls))) == pytest.approx(5000.0)
    assert next(calls, None) is None


@pytest.mark.parametrize(("us", "rounds"), [
    ([[5.0], [6.0]], FEW_ROUNDS), ([[6.0, 6.2], [5.0, 5.2], [9.0]], FEW_ROUNDS), ([[5.0, 5.4]], FEW_ROUNDS),
    ([[5.0], [5.3]], ROUNDS), ([[5.0, 5.0, 6.0], [6.3]], ROUNDS), ([[5.0], [9.0, 9.0, 9.0, 5.2]], ROUNDS),
    ([[5.0, 9.0]], ROUNDS),
])  # fmt: skip
def test_a_choice_takes_few_rounds_where_they_leave_no_doubt(
    monkeypatch: pytest.MonkeyPatch, us: list[list[float]], rounds: int
) -> None:
    """``us``: what the rounds of each arm take, over and over."""
    arms: list[Any] = [Captured(cycle(each), None, 1, lambda: None) for each in us]  # pyright: ignore[reportArgumentType]
    monkeypatch.setattr(timing, "warm_up", lambda _: None)
    monkeypatch.setattr(timing, "replay_us", next)
    samples = to_choose(arms)
    assert [len(each) for each in samples] == [rounds] * len(us)
    assert all(set(got) == set(given) for got, given in zip(samples, us, strict=True))


@pytest.mark.parametrize("enabled", [True, False])
def test_nothing_is_collected_while_a_graph_is_captured(enabled: bool) -> None:
    """And the collector is as it was behind it, also where a capture fails."""
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(RuntimeError), uncollected():
            assert not gc.isenabled()
            raise RuntimeError
        assert gc.isenabled() == enabled
    finally:
        gc.enable()
