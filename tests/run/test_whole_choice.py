"""Which way a whole graph runs: with its regions, by Inductor alone, or by eager's own kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from modules import Fn, linear, two_regions
from on_reference import check, compiled
from streamed import eagerly
from torch import Tensor, fx, nn

from tilestream.devices import get
from tilestream.graph.real import real
from tilestream.options import Options
from tilestream.plan.candidates import FALLBACK, Candidate, Plan
from tilestream.run import fallback, graphs, inductor, timing, whole
from tilestream.run.target import Target
from tilestream.run.timer import Timer

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Inductor's C++ compiler."""
    right = inductor.simplified
    monkeypatch.setattr(inductor, "compile_inner", lambda *a: eagerly(right(a[0], a[1]), *a[1:]))
    monkeypatch.setattr(fallback, "whole", lambda graph, *_: graph.forward)


def broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a mistake of ours")


@pytest.fixture
def timings(quick: None, monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """Graphs are timed by these numbers: the one with regions, and the one without, by Inductor and by eager's
    kernels; a call before the GPU is at its clocks takes so many times what it should."""
    us = {"streamed": 100.0, "inductor": 90.0, "eager": 200.0, "gain": 5.0, "at most": 1.5}
    names = {whole.STREAMED: "streamed", whole.EAGER: "eager", FALLBACK: "inductor"}
    monkeypatch.setattr(whole, "_wholes", [])
    monkeypatch.setattr(whole.Whole, "measures", lambda self: True)
    monkeypatch.setattr(Plan, "gain_us", property(lambda plan: us["gain"]))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**12, 10**12))

    def times(timer: Timer, candidates: Sequence[Candidate]) -> list[float]:
        with real(torch.device("cpu")):
            values = timer.trial.make()
            for candidate in candidates:
                timer.trial.call(candidate, values)()
        return [us[names[c.strategy]] for c in candidates]

    monkeypatch.setattr(Timer, "__call__", times)
    monkeypatch.setattr(timing, "at_most_us", lambda function: function() and us["streamed"] * us["at most"])
    monkeypatch.setattr(graphs, "saved_us", lambda *_: us.get("saved"))
    return us


@pytest.mark.parametrize(
    ("streamed", "inductor", "gain", "timed", "streams"),
    [(100.0, 90.0, 5.0, 2, False), (90.0, 100.0, 5.0, 2, True), (100.0, 90.0, 50.0, 1, True)],
)
def test_the_faster_whole_is_kept(
    timings: dict[str, float], streamed: float, inductor: float, gain: float, timed: int, streams: bool
):
    timings |= {"streamed": streamed, "inductor": inductor, "gain": gain}
    check(two_regions(), torch.randn(37, 9).bfloat16())
    (found,) = whole.wholes()
    assert found.regions == 2 and found.streams == streams
    assert found.streamed_us == streamed and found.inductor_us == (inductor if timed == 2 else None)


@pytest.mark.parametrize(
    ("streamed", "eager", "gain", "taken"),
    [(100.0, 85.0, 5.0, True), (100.0, 87.0, 5.0, False), (100.0, 90.0, 50.0, True), (100.0, 96.0, 50.0, False)],
)
@pytest.mark.every(2)
def test_eagers_kernels_run_the_whole_where_they_are_clearly_faster(
    timings: dict[str, float], monkeypatch: pytest.MonkeyPatch, streamed: float, eager: float, gain: float, taken: bool
):
    """Than Inductor's graph, 90 us, or than what is not timed beside it since its regions gain enough."""
    calls: list[int] = []
    right = inductor.compile_calls
    monkeypatch.setattr(inductor, "compile_calls", lambda *a: calls.append(1) or right(*a))
    timings |= {"streamed": streamed, "eager": eager, "gain": gain}
    check(two_regions(), torch.randn(37, 9).bfloat16())
    (found,) = whole.wholes()
    assert found.eager_us == (eager if taken else None) and found.streams == (not taken and gain == 50.0)
    assert whole.measured(whole.wholes())[0] == min(eager if taken else streamed, streamed if gain == 50.0 else 90.0)
    assert len(calls) == taken


def test_what_eagers_kernels_compute(timings: dict[str, float]):
    """Views and constants among them, results that lie as eager's do, and an argument that is written."""

    def forward(m: nn.Module, x: Tensor) -> tuple[Tensor, ...]:
        h = m.layers[0](x)
        x.mul_(2)
        weight = torch.tensor([0.5, 2.0]).to(h.dtype).repeat_interleave(h.shape[1] // 2)
        return (h * weight).T, *h[:, 2:].chunk(2, 0), h.softmax(-1).sum(0), x + 1

    timings |= {"eager": 1.0}
    module, x = Fn(forward, linear(9, 12)).bfloat16(), torch.randn(37, 9).bfloat16()
    mine, plain = x.clone(), x.clone()
    with torch.no_grad():
        got, want = compiled(module)(mine), module(plain)
    assert whole.wholes()[0].eager_us == 1.0 and torch.equal(mine, plain)
    for mine, other in zip(got, want, strict=True):
        assert torch.equal(mine, other) and mine.stride() == other.stride()


@pytest.mark.parametrize(("saved", "timed"), [(0.0, 1), (8.0, 1), (9.5, 2), (20.0, 2)])
@pytest.mark.every(2)
def test_regions_that_gain_more_than_their_borders_lose_need_no_second_compilation(
    timings: dict[str, float], saved: float, timed: int
):
    """Both regions together gain 10 us of 100: 1 us must be left of it."""
    timings |= {"streamed": 100.0, "inductor": 90.0, "gain": 5.0, "saved": saved}
    check(two_regions(), torch.randn(37, 9).bfloat16())
    (found,) = whole.wholes()
    assert found.streams == (timed == 1) and found.inductor_us == (90.0 if timed == 2 else None)


def test_kernels_that_inductor_tunes_are_timed_beside_any_gain(timings: dict[str, float]):
    """Regions were held against those that it does not tune."""
    timings |= {"gain": 50.0}
    check(two_regions(), torch.randn(37, 9).bfloat16(), coordinate_descent_tuning=True)
    (found,) = whole.wholes()
    assert found.inductor_us == 90.0 and not found.streams


@pytest.mark.parametrize(("strategy", "gain_us", "compiled_again"), [
    ("stationary", 3.0, False), ("stationary", 1.0, True), ("vertical", 3.0, True),
])  # fmt: skip
def test_weight_gradients_that_pay_need_no_second_compilation(
    timings: dict[str, float], monkeypatch: pytest.MonkeyPatch, strategy: str, gain_us: float, compiled_again: bool
):
    timings |= {"gain": gain_us}
    monkeypatch.setattr(whole.Whole, "_arguments", lambda self, *_: [])
    ours = Candidate(strategy, None, None, rejected="stands for one that runs")
    target = Target("cuda", torch.device("cpu"), get("h200"))
    choice = whole.Whole(Options(cache=False), target, {}, [Plan("sums", 64, "h200", (ours,), ours)], [])
    graphs = [fx.symbolic_trace(lambda x: x + 1), fx.symbolic_trace(lambda x: x + 2)]
    asked: list[fx.GraphModule] = []
    choice.choose(*graphs, lambda g: asked.append(g) or (lambda _: None), [], {"is_backward": True})
    assert asked == graphs[: 1 + compiled_again]


def test_what_was_kept_is_remembered(timings: dict[str, float], monkeypatch: pytest.MonkeyPatch):
    module, x = two_regions(), torch.randn(37, 9).bfloat16()
    check(module, x)
    torch._dynamo.reset()
    monkeypatch.setattr(Timer, "__call__", broken)
    check(module, x)
    first, second = whole.wholes()
    assert first == second and not first.streams


def test_timing_leaves_the_users_tensors_alone(timings: dict[str, float]):
    def forward(m: nn.Module, x: Tensor, index: Tensor) -> Tensor:
        h = m.layers[0](x)[index].cumsum(0)
        x.add_(1)
        return m.layers[0](h[:, :9] / 37).relu()

    module = Fn(forward, linear(9, 13)).bfloat16()
    x, index = torch.randn(37, 9).bfloat16(), torch.randint(37, (50,))
    mine, plain = x.clone(), x.clone()
    with torch.no_grad():
        got, want = compiled(module)(mine, index), module(plain, index)
    assert torch.equal(mine, plain) and len(whole.wholes()) == 1
    torch.testing.assert_close(got, want, rtol=0.1, atol=0.1)


def test_training_graphs_are_timed_one_by_one(timings: dict[str, float]):
    module = two_regions()
    x = torch.randn(37, 9).bfloat16().requires_grad_()
    compiled(module)(x).sum().backward()
    got = module.layers[0].weight.grad
    module.zero_grad()
    module(x).sum().backward()
    torch.testing.assert_close(got, module.layers[0].weight.grad, rtol=0.1, atol=0.1)
    assert [w.backward for w in whole.wholes()] == [False, True]
    # What is timed beside a training graph is the same without regions, and no graph that Inductor alone would make.
    assert [(w.without_us, w.inductor_us) for w in whole.wholes()] == [(90.0, None), (None, None)]
    assert whole.measured(whole.wholes()) == (190.0, None)


@pytest.mark.parametrize(("gain_us", "streamed_us"), [(11.5, None), (11.0, 100.0)])
def test_a_training_graph_whose_gain_is_clear_is_not_timed(
    timings: dict[str, float], gain_us: float, streamed_us: float | None
):
    """By a call that takes 1.5 times what it does once clocks are up: two regions gain 15 % of that, or of its time."""
    timings |= {"gain": gain_us}
    x = torch.randn(37, 9).bfloat16().requires_grad_()
    compiled(two_regions())(x).sum()
    (found,) = whole.wholes()
    assert found.streamed_us == streamed_us and found.without_us is None and found.streams


@pytest.mark.parametrize("attention", [True, False])
def test_a_graph_whose_masks_were_changed_is_ours(quick: None, monkeypatch: pytest.MonkeyPatch, attention: bool):
    """Though it has no region: Inductor would be given the graph as it was."""
    asked: list[fx.GraphModule] = []
    changed: list[fx.GraphModule] = []
    monkeypatch.setattr(fallback, "whole", lambda graph, *_: asked.append(graph) or graph.forward)
    monkeypatch.setattr(inductor, "settle_masks", lambda graph: changed.append(graph) or 1)
    x = torch.randn(5, 7)
    got = compiled(Fn(lambda _, x: x.cumsum(0)), attention=attention)(x)
    torch.testing.assert_close(got, x.cumsum(0))
    assert (len(asked), len(changed)) == ((0, 1) if attention else (1, 0))
