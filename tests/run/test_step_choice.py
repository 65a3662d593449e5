"""Which graph of a decode step runs: the step, that of its regions or Inductor's, and which of them are compiled."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tilestream.devices import H200
from tilestream.kernels.step.shape import Shape
from tilestream.options import Options
from tilestream.plan.candidates import FALLBACK, Plan
from tilestream.run import timing, whole
from tilestream.run.target import Target

SHAPE = Shape(30, 576, 1536, 9, 3, 64, 512, 49152)


def chosen(
    us: Mapping[str, float], monkeypatch: pytest.MonkeyPatch, least_us: float | None = None, **given: Any
) -> tuple[str, list[str]]:
    """The strategy of the graph that runs, and of those that were compiled, where each takes ``us``."""
    graphs = {name: fx.symbolic_trace(nn.Identity()) for name in (whole.STEP, whole.STREAMED, FALLBACK)}
    names = {id(graph): name for name, graph in graphs.items()}
    monkeypatch.setattr(whole, "Timer", lambda *_: lambda candidates: [us[c.strategy] for c in candidates])
    monkeypatch.setattr(whole.Whole, "measures", lambda _: True)
    target = Target("cuda", torch.device("cpu"), H200)
    choice = whole.Whole(Options(cache=False), target, {"of": (tuple(us.values()), str(given))}, [], [], **given)
    made: list[str] = []

    def compiles(graph: fx.GraphModule, **_: Any) -> fx.GraphModule:
        made.append(names[id(graph)])
        return graph

    step, streamed, plain = graphs.values()
    found = choice.choose(streamed, plain, compiles, [], {"is_inference": True}, (step, SHAPE), least_us)
    return names[id(found)], made


@pytest.mark.parametrize(
    ("times_us", "taken"),
    [((400, 900, 1500), whole.STEP), ((950, 900, 1500), whole.STREAMED), ((1600, 1590, 1500), FALLBACK)],
)
def test_the_fastest_of_three_graphs_runs(
    times_us: tuple[float, ...], taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    us = dict(zip((whole.STEP, whole.STREAMED, FALLBACK), times_us, strict=True))
    assert chosen(us, monkeypatch)[0] == taken
    assert whole.wholes()[-1].without_us == 1500


@pytest.mark.parametrize(("step_us", "taken"), [(400, whole.STEP), (950, whole.STREAMED)])
def test_inductors_graph_is_not_compiled_where_regions_are_clearly_faster(
    step_us: float, taken: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its first call took 49 s, 17 longer than without the step: the graph was compiled three times (SmolLM, H200)."""
    us = {whole.STEP: step_us, whole.STREAMED: 900.0}
    assert chosen(us, monkeypatch, beside_us=600.0) == (taken, [whole.STEP, whole.STREAMED])
    assert whole.wholes()[-1].without_us is None


@pytest.mark.parametrize(("regions_us", "made"), [(500.0, 1), (450.0, 3)])
def test_graphs_whose_regions_take_longer_than_the_step_are_not_compiled(
    regions_us: float, made: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    us = {whole.STEP: 399.0, whole.STREAMED: 900.0, FALLBACK: 1500.0}
    monkeypatch.setattr(whole, "total_us", lambda _: regions_us)
    assert chosen(us, monkeypatch) == (whole.STEP, [whole.STEP, whole.STREAMED, FALLBACK][:made])


@pytest.mark.parametrize(("least_us", "taken"), [(500.0, True), (490.0, False)])
def test_a_step_that_is_far_ahead_of_any_products_is_timed_alone(
    least_us: float, taken: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No regions were looked for: of SmolLM's first call that takes 10 to 15 s (H200)."""
    us = {whole.STEP: 399.0}
    if taken:
        assert chosen(us, monkeypatch, least_us=least_us) == (whole.STEP, [whole.STEP])
    else:
        with pytest.raises(KeyError):  # no graph at all
            chosen(us, monkeypatch, least_us=least_us)


def test_what_products_take_at_least() -> None:
    """A launch each, and their operands' bytes."""

    def layers(x: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return (x @ first).relu() @ second

    shapes = ((1, 4096), (4096, 8192), (8192, 4096))
    graph = make_fx(layers, tracing_mode="fake")(*(torch.empty(s, dtype=torch.bfloat16) for s in shapes))
    bytes_ = 2 * (4096 + 8192 + 2 * 4096 * 8192)
    assert whole.least_us(graph.graph, H200) == pytest.approx(
        1e6 * (2 * H200.launch_s + bytes_ / H200.dram_bytes_per_s)
    )


class Replay:
    """Stands for a CUDA graph on the CPU."""

    def __init__(self, run: Any) -> None:
        self.run, self.outputs = run, run()

    def replay(self) -> None:
        for kept, new in zip(self.outputs, self.run(), strict=True):
            kept.copy_(new)


@pytest.mark.parametrize("factor", [1.0, 1.5])
def test_a_step_that_computes_something_else_is_not_used(factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is held against float64, at the same position of the cache as the others, whoever was timed before."""

    def step(x: Tensor, cache: Tensor, length: Tensor, factor: float = factor) -> tuple[Tensor]:
        cache.index_copy_(0, length.view(1), x)
        length.add_(1)
        return (factor * (x @ cache.T),)

    given = [torch.randn(1, 64), torch.randn(8, 64), torch.tensor(5)]
    traced = {f: make_fx(partial(step, factor=f), tracing_mode="fake")(*given) for f in {1.0, factor}}
    plain = traced[1.0]
    monkeypatch.setattr(timing, "capture", Replay)
    monkeypatch.setattr(timing, "to_choose", lambda arms: [[1.0] for _ in arms])
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (10**10, 10**10))
    monkeypatch.setattr(whole.Whole, "measures", lambda _: True)
    target = Target("cuda", torch.device("cpu"), H200)
    choice = whole.Whole(Options(cache=False), target, {"of": factor}, [], given)
    fakes = [n.meta["val"] for n in plain.graph.find_nodes(op="placeholder")]
    made: list[fx.GraphModule] = []

    def compiled(graph: fx.GraphModule, **_: Any) -> Any:
        made.append(graph)
        return lambda values: list(graph(*values))

    plans: list[Plan] = []
    choose = whole.choose
    monkeypatch.setattr(whole, "choose", lambda *asked: (plans.append(choose(*asked)), plans[-1])[1])
    choice.choose(copy.deepcopy(plain), plain, compiled, fakes, {"is_inference": True}, (traced[factor], SHAPE))
    wrong = [c.strategy for c in plans[0].candidates if "wrong result" in c.rejected]
    assert wrong == ([] if factor == 1.0 else [whole.STEP])
    assert int(given[2]) == 5, "the user's own"
