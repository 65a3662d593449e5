"""One Inductor compilation with regions in it: caches, modes, what a failure costs, what is kept."""

from __future__ import annotations

import gc
import json
import logging
import os
import subprocess
import sys
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from modules import Fn, linear, two_regions
from on_reference import check, compiled
from places import SOURCES
from streamed import eagerly
from torch import Tensor, nn

from tilestream.announce import STRICT
from tilestream.errors import PlanError
from tilestream.graph import selection
from tilestream.options import Options, split
from tilestream.plan import planner
from tilestream.run import executable, fallback, prepare
from tilestream.run import inductor as one
from tilestream.run.graphs import Compilation

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
@pytest.mark.every(3)
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
