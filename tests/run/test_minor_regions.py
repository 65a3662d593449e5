"""Regions that have little of a graph's time, and what a first call asks of compilers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from modules import linear
from torch import Tensor, fx, nn

from tilestream import cuda
from tilestream.devices import get
from tilestream.graph.capture import capture
from tilestream.ir.pipeline import Pipeline
from tilestream.options import Options
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.plan.find import Found, find
from tilestream.plan.minor import effort_for
from tilestream.run import backend, executable, fallback, inductor, prepare, whole
from tilestream.run.backend import tilestream
from tilestream.run.target import Target
from tilestream.run.timer import Timer

H200 = get("h200")
TARGET = Target("cuda", torch.device("cpu"), H200)
OPTIONS = Options(cache=False)


class Model(nn.Module):
    """Two equal long regions, sorts between, and a short one of few rows."""

    def __init__(self) -> None:
        super().__init__()
        self.long = nn.ModuleList(nn.Sequential(*(linear(128, 128) for _ in range(3))) for _ in range(2))
        self.short = nn.Sequential(linear(128, 256), nn.ReLU(), linear(256, 128))

    def forward(self, x: Tensor) -> Tensor:
        for layers in self.long:
            for layer in layers:  # pyright: ignore[reportGeneralTypeIssues]
                x = layer(x).relu()
            x = x.cumsum(0)
        return self.short(x[:64])


def model() -> tuple[nn.Module, Tensor]:
    return Model().bfloat16(), torch.randn(65_536, 128).bfloat16()


def found() -> Found:
    module, x = model()
    (graph,) = capture(module, [x]).graphs
    return find(graph, "inference", OPTIONS, H200)


def test_the_shortest_regions_are_minor_together_to_a_tenth() -> None:
    *long, short = found().regions
    assert len(long) == 2 and short.minor and not any(r.minor for r in long)


def test_only_the_best_kernels_of_a_minor_region_are_candidates() -> None:
    """And its plan is kept apart from that of the same region where that is much of a graph."""
    short = found().regions[-1]
    whole_graphs = replace(short, minor=False)
    few, many = (prepare.question(r, OPTIONS, TARGET) for r in (short, whole_graphs))
    shared = [[c for c in asked.propose() if c.strategy == "shared"] for asked in (few, many)]
    assert len(shared[0]) == 1 < len(shared[1])
    assert few.key(measured=True) != many.key(measured=True)
    for options in (OPTIONS.with_(effort="exhaustive"), OPTIONS.with_(strategy="shared")):
        assert effort_for(short, options) == options


def predicted(timer: Timer, candidates: Sequence[Candidate]) -> list[float]:
    for candidate in candidates:
        if candidate.strategy == FALLBACK:
            timer.trial.call(candidate, [])
    return [candidate.predicted_us or 1.0 for candidate in candidates]


@pytest.mark.usefixtures("fresh", "plain")
def test_what_a_first_call_compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The graph once, equal regions once, and nothing of Inductor's that is not timed."""
    begun: set[Pipeline] = set()
    fallbacks: list[fx.GraphModule] = []
    graphs: list[fx.GraphModule] = []
    interpreted = inductor.compile_inner

    def start(pipelines: Sequence[Pipeline], stamped: bool = False, rank: int = 0) -> None:
        begun.update(pipelines)

    def on_inductor(graph: fx.GraphModule) -> Callable[..., Any]:
        fallbacks.append(graph)
        return graph.forward

    def compile_inner(graph: fx.GraphModule, inputs: Sequence[Any], kwargs: Any) -> tuple[Any, list[Any]]:
        graphs.append(graph)
        return interpreted(graph, inputs, kwargs)

    monkeypatch.setattr(backend, "resolve", lambda *_: TARGET)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(cuda, "start", start)
    monkeypatch.setattr(cuda, "first_ready", lambda *_: 0)
    monkeypatch.setattr(executable, "_kernels", lambda *_: SimpleNamespace(bind=lambda *_: lambda _: None))
    monkeypatch.setattr(fallback, "compiled", on_inductor)
    monkeypatch.setattr(inductor, "compile_inner", compile_inner)
    monkeypatch.setattr(whole.Whole, "measures", lambda _: False)
    monkeypatch.setattr(Timer, "__call__", predicted)
    module, x = model()
    with torch.no_grad():
        torch.compile(module, backend=tilestream, options={"cache": False})(x)
    assert (len(graphs), len(fallbacks)) == (1, 0)
    assert sorted(p.strategy for p in begun) == ["shared tile", "vertical", "vertical"]
