"""A training step's kernels are begun, and both its graphs planned, when its joint graph is cut."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence

import pytest
import torch
from on_reference import compiled
from torch import fx, nn
from torch._inductor import config

from tilestream.graph.gradients import GradientSite
from tilestream.graph.region import Region
from tilestream.ir.pipeline import Pipeline
from tilestream.options import Options
from tilestream.plan import find
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.plan.gradient_launches import GradientLaunch
from tilestream.run import ahead, gradients, prepare
from tilestream.run.graphs import Compilation
from tilestream.run.joint import Partitioner
from tilestream.run.target import resolve
from tilestream.run.timer import Timer
from tilestream.run.whole import Whole

pytestmark = pytest.mark.usefixtures("fresh")


def test_both_graphs_are_prepared_before_the_first_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is prepared is what is planned later: else compilers would work for nothing."""
    begun: list[list[Pipeline]] = []
    summed: list[int] = []
    planned: list[Pipeline] = []
    cutting: list[bool] = []
    cut = Compilation.prepare

    def prepared(self: Compilation, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        before = [str(graph.graph) for graph in (forward, backward)]
        cutting.append(True)
        cut(self, forward, backward)
        cutting.pop()
        assert before == [str(graph.graph) for graph in (forward, backward)], "the cut stays as it is"

    def begin(regions: Sequence[Region], *_: object) -> None:
        begun.extend([[r.program for r in regions]] if regions else [])

    def begin_sums(sites: Sequence[GradientSite], *_: object) -> list[GradientLaunch]:
        summed.append(len(sites))
        return []

    looked: list[bool] = []
    partition, plan = find.partition, prepare.planned
    monkeypatch.setattr(find, "partition", lambda *a, **k: (looked.append(True), partition(*a, **k))[1])
    monkeypatch.setattr(prepare, "planned", lambda r, *rest: (planned.append(r.program), plan(r, *rest))[1])
    monkeypatch.setattr(prepare, "measures", lambda *_: bool(cutting))
    monkeypatch.setattr(Timer, "__call__", predicted)
    monkeypatch.setattr(Compilation, "prepare", prepared)
    monkeypatch.setattr(ahead, "begin", begin)
    monkeypatch.setattr(gradients, "prepare", begin_sums)
    module = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 8)).bfloat16()
    compiled(module)(torch.randn(130, 24).bfloat16()).float().square().mean().backward()
    assert len(begun) == 2 and planned == [program for programs in begun for program in programs]
    assert len(looked) == 2, "what was found in a graph when it was cut is not looked for again"
    assert summed == [3]


def predicted(_: object, candidates: Sequence[Candidate]) -> list[float]:
    return [c.predicted_us or 1.0 for c in candidates]


def test_both_graphs_are_planned_when_they_are_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is timed there, Inductor's code of a region among it, is not timed again, and the cut is none the worse."""
    cutting: list[bool] = []
    timed: list[tuple[str, bool]] = []
    cut = Compilation.prepare

    def prepared(self: Compilation, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        cutting.append(config.triton.cudagraphs is False and config.use_joint_graph_passes)
        cut(self, forward, backward)
        cutting.pop()

    def times(timer: Timer, candidates: Sequence[Candidate]) -> list[float]:
        what = timer.trial.name
        if what == "backward chain":
            return [2.0, 1.0]
        if len(timed) == 1 and what != "weight gradients":
            timer.trial.call(Candidate(FALLBACK, None, None), timer.trial.make())
        timed.append((what if what == "weight gradients" else "region", cutting == [True]))
        return [1.0, 2.0] if what == "weight gradients" else predicted(timer, candidates)

    for module in (prepare, ahead):
        monkeypatch.setattr(module, "measures", lambda *_: True)
    monkeypatch.setattr(Whole, "measures", lambda _: False)
    monkeypatch.setattr(Timer, "__call__", times)
    monkeypatch.setattr(Compilation, "prepare", prepared)
    net = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 8)).bfloat16()
    x = torch.randn(130, 24).bfloat16()
    compiled(net)(x).sum().backward()
    got = [p.grad for p in net.parameters()]
    net.zero_grad()
    net(x).sum().backward()
    assert all(when for _, when in timed) and {what for what, _ in timed} == {"region", "weight gradients"}
    for mine, p in zip(got, net.parameters(), strict=True):
        torch.testing.assert_close(mine, p.grad, rtol=0.1, atol=0.01)


def test_the_compilation_is_no_part_of_the_key_of_torchs_caches() -> None:
    x = torch.zeros(4, 4)
    options = Options(target="reference")
    made = [Partitioner(Compilation(options, resolve(options, [x]), [x])) for _ in range(2)]
    assert len({pickle.dumps(p) for p in (*made, copy.deepcopy(made[0]))}) == 1
