"""Models that Dynamo cuts: which graphs are parts, and that those are chosen by the host's time, too."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from tilestream.devices import get
from tilestream.options import Options
from tilestream.plan import messages
from tilestream.plan.candidates import Candidate, Plan
from tilestream.run import timing, whole
from tilestream.run.backend import is_part, tilestream
from tilestream.run.target import Target
from tilestream.run.timer import Timer
from tilestream.run.timing import Captured


def parts_of(function: Any) -> list[bool]:
    """Of each graph that a function is cut into, whether it is taken for a part."""
    found: list[bool] = []

    def backend(graph: fx.GraphModule, _: Sequence[Any]) -> Any:
        found.append(is_part(graph))
        return graph.forward

    torch._dynamo.reset()
    torch.compile(function, backend=backend)(torch.randn(4))
    return found


def whole_one(x: Tensor) -> Tensor:
    return x.sin() + 1


def in_two(x: Tensor) -> Tensor:
    y = x.sin() + 1
    torch._dynamo.graph_break()
    return y.cos() + 1


def with_a_helper(x: Tensor) -> Tensor:
    return in_two(x) * 2


def one_that_asks(x: Tensor) -> Tensor:
    return (x + 1)[x > 0].exp()


def test_which_graphs_are_parts() -> None:
    assert parts_of(whole_one) == [False]
    assert parts_of(in_two) == [True, True]
    assert parts_of(with_a_helper) == [True, True, True]
    assert len(parts := parts_of(one_that_asks)) == 2 and all(parts)


def test_a_graph_that_is_whole_behind_one_that_was_cut() -> None:
    parts_of(in_two)
    assert parts_of(whole_one) == [False]


GRAPHS = [fx.symbolic_trace(lambda x: x + 1), fx.symbolic_trace(lambda x: x + 2)]


@pytest.mark.parametrize(("is_part", "trees"), [(True, False), (False, False), (True, True)])
def test_a_part_is_timed_both_ways_with_the_hosts_time(
    is_part: bool, trees: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However much its regions gain on the GPU; CUDA-graph trees spare the host."""
    monkeypatch.setattr(whole, "_wholes", [])
    monkeypatch.setattr(whole.Whole, "measures", lambda self: True)
    monkeypatch.setattr(whole.Whole, "_arguments", lambda self, *_: [])
    monkeypatch.setattr(Plan, "gain_us", property(lambda plan: 500.0))
    seen: list[bool] = []

    def times(timer: Timer, candidates: Sequence[Candidate]) -> list[float]:
        seen.append(timer.trial.with_host)
        return [{whole.STREAMED: 100.0, whole.EAGER: 200.0}.get(c.strategy, 90.0) for c in candidates]

    monkeypatch.setattr(Timer, "__call__", times)
    target, ours = Target("cuda", torch.device("cpu"), get("h200")), Candidate("vertical", None, None, rejected="none")
    plans = [Plan("region", 64, "h200", (ours,), ours)]
    choice = whole.Whole(Options(cache=False), target, {}, plans, [], saved_us=0.0, is_part=is_part)
    asked: list[fx.GraphModule] = []
    choice.choose(
        *GRAPHS, lambda g, **_: asked.append(g) or (lambda _: None), [], {"is_inference": True, "cudagraphs": trees}
    )
    (found,) = whole.wholes()
    counts_host = is_part and not trees
    assert set(seen) == {counts_host} and found.streams == (not counts_host)
    assert (GRAPHS[1] in asked) == counts_host


@pytest.mark.parametrize("cut", [False, True])
def test_sorted_sums_of_a_part_are_held_against_atomics(cut: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def add(x: Tensor, to: Tensor) -> Tensor:
        made = x.new_zeros(9, 6).index_add(0, to, x)
        if cut:
            torch._dynamo.graph_break()
        return made.cumsum(0)

    asked: list[bool] = []

    def choose(self: whole.Whole, streamed: fx.GraphModule, _: Any, compiled: Any, *__: Any) -> Any:
        asked.append(self.is_part)
        return compiled(streamed)

    monkeypatch.setattr(whole.Whole, "choose", choose)
    monkeypatch.setattr(messages, "atomics_us", lambda _: 1e9)
    torch._dynamo.reset()
    fast = torch.compile(add, backend=tilestream, options={"target": "reference", "cache": False})
    x, to = torch.randn(40, 6), torch.randint(9, (40,))
    with torch.no_grad():
        torch.testing.assert_close(fast(x, to), add(x, to))
    assert asked == [True] * cut


def test_calls_one_by_one_hold_what_the_host_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "warm_up", lambda _: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    arms: list[Any] = [Captured(None, None, 1, lambda s=s: time.sleep(s)) for s in (0.0, 0.003)]  # pyright: ignore
    fast, slow = timing.one_by_one(arms)
    assert len(fast) == len(slow) == timing.ROUNDS
    assert min(slow) >= 3000 > max(0.0, sorted(fast)[len(fast) // 2])
