"""One Inductor compilation with regions in it: caches, modes, what a failure costs, what is kept."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from modules import Fn, linear, two_regions
from on_reference import check, compiled
from places import SOURCES
from streamed import eagerly
from torch import Tensor, fx, nn

from tilestream.announce import STRICT
from tilestream.devices import get
from tilestream.errors import PlanError
from tilestream.graph import selection
from tilestream.graph.real import real
from tilestream.options import Options, split
from tilestream.plan import planner
from tilestream.plan.candidates import FALLBACK, Candidate, Plan
from tilestream.run import executable, fallback, graphs, inductor, prepare, timing, whole
from tilestream.run import inductor as one
from tilestream.run.graphs import Compilation
from tilestream.run.target import Target
from tilestream.run.timer import Timer

pytestmark = pytest.mark.usefixtures("fresh")


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


# -- one compilation ------------------------------------------------------------------------------------------------


def test_inductor_compiles_once(monkeypatch: pytest.MonkeyPatch):
    compilations: list[Any] = []
    right = one.compile_inner
    monkeypatch.setattr(one, "compile_inner", lambda *a: compilations.append(a) or right(*a))
    check(two_regions(), torch.randn(37, 9).bfloat16())
    assert len(compilations) == 1 and len(prepare.analyses()) == 2


def test_a_graph_without_a_region_is_inductors_from_the_start(monkeypatch: pytest.MonkeyPatch):
    asked: list[Any] = []
    right = fallback.whole
    monkeypatch.setattr(fallback, "whole", lambda *a: asked.append(a) or right(*a))
    module = Fn(lambda m, x: x.cumsum(0).relu() * 2)
    check(module, torch.randn(37, 9).bfloat16())
    ((graph, _, _),) = asked
    assert {n.target for n in graph.graph.nodes if n.op == "call_method"} >= {"cumsum"}  # Dynamo's graph, not ATen's


def test_a_graph_that_is_one_region_needs_no_inductor(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(one, "compile_inner", None)
    check(nn.Sequential(linear(9, 13), nn.ReLU(), linear(13, 5)).bfloat16(), torch.randn(2, 37, 9).bfloat16())
    assert len(prepare.analyses()) == 1


def test_attention_beside_regions_stays_compiled(caplog: pytest.LogCaptureFixture):
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.qkv, self.out = linear(32, 96), linear(32, 32)
            self.norm, self.up, self.down = nn.LayerNorm(32), linear(32, 64), linear(64, 32)

        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (t.unflatten(-1, (2, 16)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            return x + self.down(F.gelu(self.up(self.norm(x))))

    with caplog.at_level(logging.WARNING, "tilestream"):
        check(Block().bfloat16(), torch.randn(2, 10, 32).bfloat16())
    assert prepare.analyses() and not any("eagerly" in line for line in warnings(caplog))


@pytest.mark.parametrize("inputs", [(), (torch.tensor(2.0),)])
def test_graphs_without_a_tensor_that_has_rows(inputs: tuple[Tensor, ...]):
    def forward(m: nn.Module, *x: Tensor) -> Tensor:
        return torch.arange(9.0) * (x[0] if x else 2)

    torch.testing.assert_close(compiled(Fn(forward))(*inputs), torch.arange(9.0) * 2)


def test_a_graph_after_a_break_may_have_scalars_alone():
    def forward(m: nn.Module, x: Tensor) -> Tensor:
        h = m.layers[0](x).relu().sum()
        torch._dynamo.graph_break()
        return h * 2 + 1

    module = Fn(forward, linear(9, 13)).bfloat16()
    x = torch.randn(37, 9).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(compiled(module)(x), module(x), rtol=0.02, atol=0.1)
    assert len(prepare.analyses()) == 1


# -- modes and options ----------------------------------------------------------------------------------------------


def test_inductors_options_and_ours_side_by_side():
    options, patches = split({"target": "reference", "max_autotune": True, "triton.cudagraphs": True})
    assert options == Options(target="reference") and patches == {"max_autotune": True, "triton.cudagraphs": True}
    options, patches = split({"strategy": "vertical", "mode": "max-autotune"})
    assert options.strategy == "vertical" and patches["max_autotune"] and patches["triton.cudagraphs"]
    assert split(None, "reduce-overhead")[1] == {"triton.cudagraphs": True}


@pytest.mark.parametrize("given", [{"mode": "reduce-overhead"}, {"options": {"epilogue_fusion": False}}])
def test_they_reach_what_inductor_compiles(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch):
    from torch._inductor import config

    from tilestream.run.backend import tilestream

    seen: list[tuple[bool, bool]] = []
    right = one.compile_inner
    note = lambda *a: seen.append((config.triton.cudagraphs, config.epilogue_fusion)) or right(*a)  # noqa: E731
    monkeypatch.setattr(one, "compile_inner", note)
    given = {**given, "options": {"target": "reference", **given["options"]}} if "options" in given else given
    if "mode" in given:
        given = {"options": {"target": "reference", "mode": given["mode"]}}
    module, x = two_regions(), torch.randn(37, 9).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(torch.compile(module, backend=tilestream, **given)(x), module(x), rtol=0.1, atol=0.1)
    assert seen == [(True, True)] if "mode" in given["options"] else [(False, False)]


# -- caches ---------------------------------------------------------------------------------------------------------

STEPS = """
import json, os, sys, torch
from torch import nn
from torch._dynamo.utils import counters
from tilestream.run import prepare
from tilestream.run.backend import tilestream
def step():
    torch.manual_seed(0)
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(9, 13), nn.Linear(13, 7)
        def forward(self, x):
            return self.b(self.a(x).relu().cumsum(0) / 37).relu()
    net, x = Net().bfloat16(), torch.randn(37, 9).bfloat16()
    fast = torch.compile(net, backend=tilestream, options={"target": "reference"})
    with torch.no_grad():
        got, want = fast(x), net(x)
    error = ((got - want).float().norm() / want.float().norm()).item()
    planned = [len(prepare.analyses())]
    fast(x).sum().backward()
    gradient = net.a.weight.grad.float().norm().item()
    hits = counters["aot_autograd"]["autograd_cache_hit"]
    planned.append(len(prepare.analyses()))
    print(json.dumps({"error": error, "gradient": gradient, "hits": hits, "planned": planned}))
for ours in sys.argv[1:]:  # one process after another, with torch loaded, which takes longer than a step
    if not (child := os.fork()):
        os.environ["TILESTREAM_CACHE_DIR"] = ours
        step()
        sys.exit()
    if os.waitpid(child, 0)[1]:
        sys.exit(1)
"""


def processes(inductor: Path, *ours: Path) -> list[dict[str, Any]]:
    """A step of training and a call without gradients, in a process for each of our cache's folders."""
    env = {**os.environ, "PYTHONPATH": str(SOURCES), "TORCHINDUCTOR_CACHE_DIR": str(inductor), "TILESTREAM_STRICT": "1"}
    command = [sys.executable, "-c", STEPS, *map(str, ours)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]


@pytest.mark.early
def test_a_second_process_finds_all_graphs_compiled_and_needs_nothing_of_ours(tmp_path: Path):
    """The graphs carry their regions: our own caches may be gone, and the plans are still those they have."""
    first, second = processes(tmp_path / "inductor", tmp_path / "ours", tmp_path / "elsewhere")
    assert first["hits"] == 0 and first["planned"][0] == 2 < first["planned"][1] and first["error"] < 0.02
    assert second["hits"] == 2 and second["planned"] == [0, 0]
    assert second["error"] == first["error"] and second["gradient"] == first["gradient"]


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[Any]]:
    """The graphs that are looked for in AOTAutograd's cache, which is on."""
    from torch._functorch import config
    from torch._functorch._aot_autograd.autograd_cache import AOTAutogradCache

    graphs: list[Any] = []
    right = AOTAutogradCache.try_load
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "inductor"))  # what another run kept is not found
    monkeypatch.setattr(AOTAutogradCache, "try_load", lambda *a, **k: graphs.append(a) or right(*a, **k))
    with config.patch(enable_autograd_cache=True):
        yield graphs


def test_a_graph_that_torch_keeps_nothing_of_is_searched_once(searched: list[Any], monkeypatch: pytest.MonkeyPatch):
    net = nn.Sequential(linear(9, 13), nn.ReLU(), linear(13, 5)).bfloat16()

    def searches(rows: int = 37, **options: Any) -> int:
        before = len(searched)
        torch._dynamo.reset()
        check(net, torch.randn(rows, 9).bfloat16(), **options)
        return len(searched) - before

    assert [searches(), searches()] == [1, 0]
    assert [searches(rows=41), searches(cache=False)] == [1, 0]  # another graph; and nothing is kept of what is not to
    with monkeypatch.context() as changed, torch._inductor.config.patch(compile_threads=3):
        threads: list[Any] = []
        changed.setattr(one, "is_direct", lambda graph: threads.append(torch._inductor.config.compile_threads))
        assert [searches(), searches()] == [0, 1]  # the note was wrong by then, and withdrawn
        assert threads == [1, 3]  # nor are processes started for what Inductor does not compile


def test_a_graph_that_torch_keeps_is_searched_again(searched: list[Any], quick: None):
    net = two_regions()
    for _ in range(2):
        torch._dynamo.reset()
        check(net, torch.randn(37, 9).bfloat16())
    assert len(searched) == 2


# -- failures -------------------------------------------------------------------------------------------------------


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Inductor's C++ compiler."""
    monkeypatch.setattr(one, "compile_inner", lambda *a: eagerly(one.simplified(a[0], a[1]), *a[1:]))
    monkeypatch.setattr(fallback, "whole", lambda graph, *_: graph.forward)


def broken(*_: Any, **__: Any) -> Any:
    raise ZeroDivisionError("a mistake of ours")


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize(
    "where",
    [
        "tilestream.plan.find.rewrite",
        "tilestream.plan.find.partition",
        "tilestream.run.graphs.plan_graph",
        "tilestream.run.graphs.Calls",
        "tilestream.run.place.encode",
        "tilestream.run.prepare.chooser.choose",
        "tilestream.run.prepare.executable",
        "tilestream.run.inductor.simplified",
    ],
)
def test_a_mistake_of_ours_costs_regions_and_no_call(
    quick: None, where: str, strict: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(where, broken)
    module, x = two_regions(), torch.randn(37, 9).bfloat16()
    if strict:
        with torch.no_grad(), pytest.raises(Exception, match="a mistake of ours"):
            compiled(module)(x)
        return
    monkeypatch.delenv(STRICT)
    with caplog.at_level(logging.INFO, "tilestream"):
        check(module, x)
    lines = [line for line in warnings(caplog) if "a mistake of ours" in line]
    assert lines and all("goes to Inductor: ZeroDivisionError" in line and "\n" not in line for line in lines)
    assert any(r.exc_info for r in caplog.records)


def test_one_region_that_cannot_be_planned_costs_itself_alone(quick: None, monkeypatch: pytest.MonkeyPatch):
    right = planner.proposals

    def proposals(program: Any, *rest: Any) -> Any:
        if any(t.shape == (13, 9) for t in program.tensors):
            raise PlanError("not this one", "use the other")
        return right(program, *rest)

    monkeypatch.setattr(planner, "proposals", proposals)
    check(two_regions(), torch.randn(37, 9).bfloat16())
    assert [a.problem for a in prepare.analyses()] == ["not this one. Remedy: use the other", ""]


@pytest.mark.parametrize("where", ["lower", "operators.emit"])
def test_a_mistake_in_one_region_leaves_the_other(
    quick: None, where: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """The first layer's region alone is lost, whether a whole region or a single operator fails."""
    monkeypatch.delenv(STRICT)
    if where == "lower":
        right = selection.lower
        fails = lambda o, group, *a, **k: broken() if "addmm" == group[0].name else right(o, group, *a, **k)  # noqa: E731
        monkeypatch.setattr(selection, "lower", fails)
    else:
        emit = selection.operators.emit
        fails = lambda e, node: broken() if "addmm" == node.name else emit(e, node)  # noqa: E731
        monkeypatch.setattr(selection.operators, "emit", fails)
    with caplog.at_level(logging.WARNING, "tilestream"):
        check(two_regions(), torch.randn(37, 9).bfloat16())
    assert len(prepare.analyses()) == 1
    assert any("aten.addmm.default" in line and "ZeroDivisionError: a mistake" in line for line in warnings(caplog))


def test_a_pipeline_that_cannot_run_becomes_torch_operators(
    quick: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.delenv(STRICT)
    monkeypatch.setattr(executable.Interpreted, "bind", _first_fails(executable.Interpreted.bind))
    with caplog.at_level(logging.WARNING, "tilestream"):
        check(two_regions(), torch.randn(37, 9).bfloat16())
    assert any("a region runs as plain torch operators: ZeroDivisionError" in line for line in warnings(caplog))


def _first_fails(right: Any) -> Any:
    calls: list[int] = []

    def bind(self: Any, *args: Any) -> Any:
        calls.append(1)
        return broken() if len(calls) == 1 else right(self, *args)

    return bind


def test_without_fallback_a_mistake_is_an_error(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv(STRICT)
    monkeypatch.setattr("tilestream.run.prepare.chooser.choose", broken)
    module = nn.Sequential(linear(9, 13), nn.ReLU()).bfloat16()
    with torch.no_grad(), pytest.raises(Exception, match="a mistake of ours"):
        compiled(module, fallback=False)(torch.randn(37, 9).bfloat16())


# -- never slower ---------------------------------------------------------------------------------------------------


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


def test_a_mistake_in_the_backward_graph_costs_its_regions(
    quick: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    right = Compilation.choose
    monkeypatch.delenv(STRICT)
    monkeypatch.setattr(
        Compilation, "choose", lambda self, *a: broken() if a[-1].get("is_backward") else right(self, *a)
    )
    module, x = two_regions(), torch.randn(37, 9).bfloat16()
    with caplog.at_level(logging.WARNING, "tilestream"):
        compiled(module)(x).sum().backward()
    got = module.layers[0].weight.grad
    module.zero_grad()
    module(x).sum().backward()
    torch.testing.assert_close(got, module.layers[0].weight.grad, rtol=0.1, atol=0.1)
    assert any("the backward graph goes to Inductor: ZeroDivisionError" in line for line in warnings(caplog))


@pytest.mark.parametrize("train", [False, True])
def test_the_users_tensors_are_not_kept(train: bool):
    module, x = two_regions(), torch.randn(37, 9).bfloat16()
    gone = weakref.ref(x)
    fast = compiled(module)
    with torch.set_grad_enabled(train):
        fast(x)
    del x
    gc.collect()
    assert gone() is None
    del fast
