"""Measured choice: real kernels against Inductor on a GPU; wrong candidates are rejected."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import near_eager
import pytest
import torch
from modules import ALL, Fn, linear
from streamed import Altered
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from tilestream.devices import get
from tilestream.errors import CompileError, PlanError
from tilestream.graph.capture import capture
from tilestream.graph.region import Region
from tilestream.graph.selection import partition
from tilestream.ir.pipeline import Pipeline
from tilestream.plan import margins
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.plan.chooser import NotTimedNow
from tilestream.run import backend, fallback, oracle, prepare, timer, timing
from tilestream.run import executable as execution
from tilestream.run.backend import tilestream
from tilestream.run.call import RegionCall
from tilestream.run.made_up import check_room
from tilestream.run.target import Target
from tilestream.run.time_regions import as_left, begin_inductors, region_trial
from tilestream.run.timer import Timer

FUSED, RELU = torch.ops.aten._addmm_activation.default, torch.ops.aten.relu.default

pytestmark = pytest.mark.usefixtures("fresh")


def chain(width: int = 64, layers: int = 3) -> nn.Module:
    modules = [m for _ in range(layers) for m in (linear(width, width), nn.ReLU())]
    return nn.Sequential(*modules).to("cuda", torch.bfloat16)


def check(module: nn.Module, inputs: list[Tensor], **options: Any) -> None:
    fast = torch.compile(module, backend=tilestream, options={"target": "cuda", **options})
    with torch.no_grad():
        got = pytree.tree_leaves(fast(*inputs))
    near_eager.check(got, module, inputs)


class Replay:
    """Stands for a CUDA graph on the CPU: runs the call again, into the outputs of the first."""

    def __init__(self, run: Callable[[], Sequence[Tensor]]) -> None:
        self.run = run
        self.outputs = list(run())

    def replay(self) -> None:
        for kept, new in zip(self.outputs, self.run(), strict=True):
            kept[: len(new)] = new


@pytest.fixture
def on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> tuple[Region, Target]:
    """A region, and clocks that time nothing: every candidate takes 5 microseconds."""
    monkeypatch.setattr(timing, "capture", Replay)
    monkeypatch.setattr(timing, "to_choose", lambda arms: [[5.0] for _ in arms])
    module = nn.Sequential(linear(9, 13), nn.ReLU()).bfloat16()
    (graph,) = capture(module, [torch.randn(70, 9).bfloat16()]).graphs
    (region,) = partition(graph).regions
    return region, Target("reference", torch.device("cpu"), get("h200"))


def timer_of(region: Region, target: Target, patience_s: float = margins.PATIENCE_S, **kwargs: Any) -> Timer:
    return Timer(region_trial(region, target, **kwargs), target, patience_s)


def test_the_fallback_is_timed_with_epilogues_as_an_epilogue(
    on_the_cpu: tuple[Region, Target], monkeypatch: pytest.MonkeyPatch
):
    """A graph without this region would have it (``rewrites.epilogues``)."""
    _, target = on_the_cpu
    module = nn.Sequential(linear(16, 24), nn.ReLU(), linear(24, 8)).bfloat16()
    (graph,) = capture(module, [torch.randn(70, 16).bfloat16()]).graphs
    (region,) = partition(graph).regions
    given: list[str] = []

    def rest(left: fx.GraphModule) -> fallback.Call:
        given.extend(str(n.target) for n in left.graph.find_nodes(op="call_function", target=FUSED))
        given.extend(str(n.target) for n in left.graph.find_nodes(op="call_function", target=RELU))
        return fallback.eager(left)

    monkeypatch.setattr(fallback, "rest", rest)
    assert timer_of(region, target)([Candidate(FALLBACK, None, None)]) == [5.0]
    assert given == [str(FUSED)]
    assert region.graph.graph.find_nodes(op="call_function", target=RELU), "the region's own graph is eager's"


def test_a_graph_with_a_smaller_region_is_checked_like_a_pipeline(
    on_the_cpu: tuple[Region, Target], monkeypatch: pytest.MonkeyPatch
):
    region, target = on_the_cpu
    monkeypatch.setattr(fallback, "rest", fallback.eager)
    wrong = as_left(region)
    (output,) = wrong.graph.find_nodes(op="output")
    with wrong.graph.inserting_before(output):
        output.args = ((wrong.graph.call_function(torch.ops.aten.neg.default, (output.args[0][0],)),),)
    wrong.recompile()
    graphs = {"right": as_left(region), "wrong": wrong}
    made = timer_of(region, target, graphs=graphs)
    right, refused = made([Candidate(name, None, None, operator="a graph") for name in graphs])
    assert right == 5.0 and isinstance(refused, PlanError) and "wrong result" in str(refused)


def test_candidates_are_timed_side_by_side(on_the_cpu: tuple[Region, Target], monkeypatch: pytest.MonkeyPatch):
    region, target = on_the_cpu
    rounds: list[int] = []

    def in_turn(arms: list[Replay]) -> list[list[float]]:
        rounds.append(len(arms))
        return [[10.0 + k] for k in range(len(arms))]

    monkeypatch.setattr(timing, "to_choose", in_turn)
    made = timer_of(region, target)
    assert made([Candidate(name, region.program, 1.0) for name in ("vertical", "spatial", "bulk")]) == [
        10.0,
        11.0,
        12.0,
    ]
    assert made([Candidate("fallback", None, 1.0)]) == [11.0]
    assert rounds == [3, 2]  # the fallback beside the fastest


def test_the_fallback_is_timed_at_the_clocks_of_the_fastest_candidate(
    on_the_cpu: tuple[Region, Target], monkeypatch: pytest.MonkeyPatch
):
    region, target = on_the_cpu
    made = timer_of(region, target)
    made([Candidate("vertical", region.program, 1.0)])
    # Clocks fall to half: what took 5 takes 10 now, and the fallback takes 30.
    monkeypatch.setattr(timing, "to_choose", lambda _: [[10.0], [30.0]])
    assert made([Candidate("fallback", None, 1.0)]) == [15.0]


def test_one_that_cannot_be_built_does_not_keep_others_from_being_timed(
    on_the_cpu: tuple[Region, Target], monkeypatch: pytest.MonkeyPatch
):
    region, target = on_the_cpu
    other = replace(region.program, name="other")
    right = execution._reference

    def reference(pipeline: Any) -> execution.Executable:
        if pipeline.name == "other":
            raise CompileError("no NVRTC", "install it")
        return right(pipeline)

    monkeypatch.setattr(execution, "_reference", reference)
    made = timer_of(region, target)
    failed, us = made([Candidate("vertical", other, 1.0), Candidate("spatial", region.program, 1.0)])
    assert isinstance(failed, CompileError) and us == 5.0


def test_a_fault_while_timing_is_the_reason_of_all(on_the_cpu: tuple[Region, Target], monkeypatch: pytest.MonkeyPatch):
    def fails(_: object) -> list[list[float]]:
        raise RuntimeError("CUDA error: unspecified launch failure")

    region, target = on_the_cpu
    monkeypatch.setattr(timing, "to_choose", fails)
    found = timer_of(region, target)([Candidate(name, region.program, 1.0) for name in ("vertical", "bulk")])
    assert [str(error) for error in found] == ["CUDA error: unspecified launch failure"] * 2


def test_the_whole_choice(
    on_the_cpu: tuple[Region, Target], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Everything but the GPU is real: candidates, kernels compiled in the background, checks, the choice."""
    target = Target("cuda", torch.device("cpu"), get("h200"))
    monkeypatch.setattr(backend, "resolve", lambda *_: target)
    monkeypatch.setattr(execution, "_kernels", lambda pipeline, *_: execution._reference(pipeline))
    monkeypatch.setattr(margins, "PATIENCE_S", 60.0)
    monkeypatch.setattr(margins, "SURE", 0.0)  # the fallback is timed, however clear the prediction
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)

    def by_who_runs(arms: list[Replay]) -> list[list[float]]:
        calls = [getattr(arm.run, "func", None) for arm in arms]
        return [[5.0 if isinstance(getattr(call, "__self__", None), RegionCall) else 9.0] for call in calls]

    monkeypatch.setattr(timing, "to_choose", by_who_runs)
    module = nn.Sequential(linear(24, 40), nn.ReLU(), linear(40, 24)).bfloat16()
    x = torch.randn(200, 24).bfloat16()
    with torch.no_grad(), caplog.at_level(logging.INFO, "tilestream"):
        got = torch.compile(module, backend=tilestream)(x)
        torch.testing.assert_close(got, module(x), rtol=0.02, atol=0.02)
    (analysis,) = prepare.analyses()
    assert analysis.plan is not None and analysis.plan.chosen.measured_us == 5.0
    times = {c.name: c.measured_us for c in analysis.plan.candidates}
    assert times["fallback"] == 9.0 and sum(us == 5.0 for us in times.values()) >= 2


def on_a_gpu_without_vertical_kernels(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A GPU that the reference machine stands for, and a compiler that refuses kernels of one stage; what it is asked
    for, by strategy."""
    asked: list[str] = []

    def kernels(pipeline: Pipeline, *_: Any) -> execution.Executable:
        asked.append(pipeline.strategy)
        if pipeline.strategy == "vertical":
            raise CompileError("ptxas spills 8 bytes", "report it")
        return execution._reference(pipeline)

    monkeypatch.setattr(backend, "resolve", lambda *_: Target("cuda", torch.device("cpu"), get("h200")))
    monkeypatch.setattr(execution, "_kernels", kernels)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return asked


def test_stages_over_sms_run_where_no_vertical_kernel_can_be_built(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    """Predictions alone: the choice cannot be built, nor any other vertical pipeline, and a spatial one computes."""
    asked = on_a_gpu_without_vertical_kernels(monkeypatch)
    monkeypatch.setattr(margins, "MARGIN", 1e6)  # what the fallback takes is not the point here
    module = nn.Sequential(*(m for _ in range(4) for m in (linear(64, 64), nn.ReLU()))).bfloat16()
    x = torch.randn(200, 64).bfloat16()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "tilestream"):
        got = torch.compile(module, backend=tilestream, options={"measure": False})(x)
        torch.testing.assert_close(got, module(x), rtol=0.02, atol=0.02)
    (analysis,) = prepare.analyses()
    assert analysis.plan is not None and analysis.plan.chosen.strategy == "spatial" and not analysis.problem
    assert asked[0] == "vertical" and asked[-1] == "spatial"
    refused = [c.rejected for c in analysis.plan.candidates if c.strategy == "vertical" and c.pipeline is not None]
    assert refused and all("could not be built: ptxas spills 8 bytes" in why for why in refused)
    assert "could not be built: ptxas spills 8 bytes" in caplog.text


def test_a_forced_strategy_that_cannot_be_built_is_left_to_inductor(monkeypatch: pytest.MonkeyPatch):
    asked = on_a_gpu_without_vertical_kernels(monkeypatch)
    module = nn.Sequential(linear(64, 64), nn.ReLU(), linear(64, 64)).bfloat16()
    x = torch.randn(200, 64).bfloat16()
    with torch.no_grad():
        got = torch.compile(module, backend=tilestream, options={"measure": False, "strategy": "vertical"})(x)
        torch.testing.assert_close(got, module(x), rtol=0.02, atol=0.02)
    (analysis,) = prepare.analyses()
    assert set(asked) == {"vertical"} and "ptxas spills" in analysis.problem


@pytest.mark.parametrize("fault", ["scaled", "last rows not written"])
def test_a_wrong_candidate_is_rejected(
    on_the_cpu: tuple[Region, Target], fault: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    region, target = on_the_cpu
    right = execution._reference

    def wrong(pipeline: Any) -> execution.Executable:
        return Altered(right(pipeline), 1, lambda t: t.mul_(1.02) if fault == "scaled" else t)

    monkeypatch.setattr(execution, "_reference", wrong)
    if fault != "scaled":
        monkeypatch.setattr(Replay, "replay", lambda self: self.outputs[0][:64].copy_(self.run()[0][:64]))
    with caplog.at_level(logging.ERROR, "tilestream"):
        (found,) = timer_of(region, target, math.inf)([Candidate("vertical", region.program, 1.0)])
    assert isinstance(found, PlanError) and "computes a wrong result" in str(found)
    assert any("report this" in r.getMessage() for r in caplog.records)


@pytest.mark.parametrize("patience_s", [margins.PATIENCE_S, math.inf])
def test_one_candidate_is_waited_for_and_all_where_a_strategy_is_forced(
    on_the_cpu: tuple[Region, Target], monkeypatch: pytest.MonkeyPatch, patience_s: float
):
    """The second is ready first, and timed; the first is waited for no longer than it is worth."""
    region, target = on_the_cpu
    waited: list[tuple[int, float | None]] = []

    def first_built(groups: Any, kind: str, timeout_s: float | None, in_turn: bool = False) -> int | None:
        waited.append((len(groups), timeout_s))
        return None if timeout_s is not None else len(groups) - 1

    monkeypatch.setattr(timer, "first_built", first_built)
    made = timer_of(region, target, patience_s)
    first, second = made([Candidate("vertical", region.program, 1.0), Candidate("spatial", region.program, 2.0)])
    assert second == 5.0 and waited[0] == (2, None)
    if math.isfinite(patience_s):
        left_s = waited[1][1]
        assert isinstance(first, NotTimedNow) and left_s is not None and 0 < left_s <= patience_s
        assert "it takes more than 5 s to build" in str(first) and "strategy='vertical'" in str(first)
    else:
        assert first == 5.0 and waited[1] == (1, None)
    monkeypatch.setattr(timer, "first_built", lambda *_: 0)
    assert made([Candidate("fallback", None, 3.0)]) == [5.0]


def test_short_memory_is_a_reason_for_now(on_the_cpu: tuple[Region, Target], monkeypatch: pytest.MonkeyPatch):
    """What did not fit beside a user's tensors may fit in the next process: the choice is not kept on disk."""
    region, target = on_the_cpu
    trial = region_trial(region, target)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (1000, 10**12))

    def too_many() -> list[Tensor]:
        check_room(401, target.device)
        return []

    (found,) = Timer(replace(trial, make=too_many), target)([Candidate("vertical", region.program, 1.0)])
    assert isinstance(found, NotTimedNow) and "401 bytes" in str(found)

    def out_of_memory(_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(timing, "capture", out_of_memory)
    (found,) = Timer(trial, target)([Candidate("vertical", region.program, 1.0)])
    assert isinstance(found, NotTimedNow) and "out of memory" in str(found)


def test_inductors_code_of_a_region_begins_once(
    on_the_cpu: tuple[Region, Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    region, target = on_the_cpu
    done: list[str] = []
    call = fallback.eager(region.graph)
    monkeypatch.setattr(fallback, "begin", lambda _: (done.append("begins"), lambda: (done.append("ends"), call)[1])[1])
    monkeypatch.setattr(fallback, "rest", lambda _: (done.append("at once"), call)[1])
    begin_inductors(region)
    for _ in range(2):
        assert timer_of(region, target)([Candidate("fallback", None, 3.0)]) == [5.0]
    assert done == ["begins", "ends", "at once"]


@pytest.mark.gpu
@pytest.mark.parametrize("strategy", ["vertical", "spatial"])
@pytest.mark.parametrize("name", ALL)
def test_modules_on_the_gpu(name: str, strategy: str):
    module, shapes = ALL[name]
    module = module.to("cuda", torch.bfloat16)
    try:
        check(module, [torch.randn(s).to("cuda", torch.bfloat16) for s in shapes], strategy=strategy, measure=False)
    finally:
        module.to("cpu")


@pytest.mark.gpu
def test_candidates_are_timed_beside_the_fallback(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(margins, "SURE", 0.0)  # however clear the prediction
    check(chain(), [torch.randn(8192, 64, device="cuda", dtype=torch.bfloat16)])
    (analysis,) = prepare.analyses()
    assert analysis.plan is not None
    timed = {c.name: c.measured_us for c in analysis.plan.candidates if c.measured_us is not None}
    assert "fallback" in timed and len(timed) > 1  # too few rows for the bound to decide
    assert analysis.plan.chosen.measured_us in (min(timed.values()), timed["fallback"])


@pytest.mark.gpu
def test_slow_builds_end_the_measuring(monkeypatch: pytest.MonkeyPatch):
    def first_built(groups: Any, kind: str, timeout_s: float | None, in_turn: bool = False) -> int | None:
        if timeout_s is None:
            return execution.first_built(groups[:1], kind, None)
        return None

    monkeypatch.setattr(timer, "first_built", first_built)
    monkeypatch.setattr(margins, "SURE", 0.0)
    check(chain(), [torch.randn(8192, 64, device="cuda", dtype=torch.bfloat16)])
    (analysis,) = prepare.analyses()
    assert analysis.plan is not None
    timed = [c for c in analysis.plan.candidates if c.measured_us is not None]
    assert len(timed) == 2 and any("is not timed" in c.rejected for c in analysis.plan.candidates)


@pytest.mark.gpu
def test_a_wrong_candidate_never_wins(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture):
    right = execution._kernels

    def wrong(pipeline: Any, device: torch.device, early: bool) -> execution.Executable:
        return Altered(right(pipeline, device, early), 1, lambda t: t.mul_(1.05))

    monkeypatch.setattr(execution, "_kernels", wrong)
    with caplog.at_level(logging.ERROR, "tilestream"):
        check(chain(), [torch.randn(8192, 64, device="cuda", dtype=torch.bfloat16)])
    (analysis,) = prepare.analyses()
    assert analysis.plan is not None and analysis.plan.chosen.pipeline is None
    assert any("wrong result" in r.getMessage() for r in caplog.records)


@pytest.mark.gpu
def test_graph_capture_and_new_row_counts():
    module = chain()
    fast = torch.compile(module, backend=tilestream, options={"strategy": "vertical"})
    with torch.no_grad():
        built = 0
        for rows in (8192, 100, 1, 65):
            x = torch.randn(rows, 64, device="cuda", dtype=torch.bfloat16)
            torch.testing.assert_close(fast(x), module(x), rtol=0.05, atol=0.05)
            built = built or len(execution._executables)
        assert len(execution._executables) == built
        x = torch.randn(8192, 64, device="cuda", dtype=torch.bfloat16)
        fast(x)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = fast(x)
        for _ in range(1000):
            graph.replay()
        torch.testing.assert_close(out, module(x), rtol=0.05, atol=0.05)


class Edges(nn.Module):
    """A message-passing block: gathers, an MLP over edges, a scatter, an MLP over nodes."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.edge = nn.Sequential(linear(3 * width, width), nn.SiLU(), linear(width, width), nn.LayerNorm(width))
        self.node = nn.Sequential(linear(2 * width, width), nn.SiLU(), linear(width, width), nn.LayerNorm(width))

    def forward(self, x: Tensor, e: Tensor, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        messages = self.edge(torch.cat([e, x[source], x[target]], -1))
        gathered = torch.zeros_like(x).index_add(0, target, messages)
        return x + self.node(torch.cat([x, gathered], -1)), e + messages


@pytest.mark.gpu
def test_regions_beside_inductor_on_the_gpu():
    module = Edges(64).to("cuda", torch.bfloat16)
    x, e = (torch.randn(n, 64, device="cuda", dtype=torch.bfloat16) for n in (500, 3000))
    ends = [torch.randint(500, (3000,), device="cuda") for _ in range(2)]
    fast = torch.compile(module, backend=tilestream, options={"strategy": "vertical"})
    with torch.no_grad():
        for got, plain in zip(fast(x, e, *ends), module(x, e, *ends), strict=True):
            torch.testing.assert_close(got, plain, rtol=0.05, atol=0.1)
    assert [a.plan.chosen.strategy for a in prepare.analyses() if a.plan] == ["vertical", "vertical"]


@pytest.mark.gpu
def test_training_on_the_gpu():
    """Forward and backward graphs have regions of their own; gradients are as near to float64 as eager's."""
    module = chain()
    x = torch.randn(1000, 64, device="cuda", dtype=torch.bfloat16)
    torch.compile(module, backend=tilestream, options={"strategy": "vertical"})(x).square().sum().backward()
    got = [p.grad for p in module.parameters()]
    module.zero_grad()
    module(x).square().sum().backward()
    eager = [p.grad for p in module.parameters()]
    module.zero_grad()
    module.double()(x.double()).square().sum().backward()
    exact = [p.grad for p in module.parameters()]
    error, own, good = oracle.judge(got, eager, exact)  # pyright: ignore[reportArgumentType]
    assert good, f"error {error:.2e}, eager's {own:.2e}"
    assert len(prepare.analyses()) >= 2


@pytest.mark.gpu
def test_two_streams():
    module = chain()
    fast = torch.compile(module, backend=tilestream, options={"strategy": "spatial"})
    inputs = [torch.randn(5000, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2)]
    streams = [torch.cuda.Stream() for _ in inputs]
    with torch.no_grad():
        want = [module(x) for x in inputs]
        fast(inputs[0])
        torch.cuda.synchronize()
        got: list[Tensor] = []
        for _ in range(20):
            got = []
            for x, stream in zip(inputs, streams, strict=True):
                with torch.cuda.stream(stream):
                    got.append(fast(x))
        torch.cuda.synchronize()
    for mine, plain in zip(got, want, strict=True):
        torch.testing.assert_close(mine, plain, rtol=0.05, atol=0.05)


@pytest.mark.gpu
def test_misaligned_inputs_are_copied():
    module = Fn(lambda m, x: m.layers[0](x[1:]), linear(9, 13)).to("cuda", torch.bfloat16)
    check(module, [torch.randn(129, 9, device="cuda", dtype=torch.bfloat16)], strategy="vertical")
