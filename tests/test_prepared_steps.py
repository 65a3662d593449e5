"""Kernels of a training step begin to be compiled when its joint graph is cut, and not a graph at a time."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Sequence

import pytest
import torch
from test_backend import compiled
from torch import fx, nn

from tilestream.graph.gradients import GradientSite
from tilestream.graph.selection import Partition
from tilestream.options import Options
from tilestream.run import prepare
from tilestream.run.graphs import Compilation
from tilestream.run.joint import Partitioner
from tilestream.run.target import resolve

pytestmark = pytest.mark.usefixtures("fresh")


def test_both_graphs_are_prepared_before_the_first_is_planned(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is prepared is what is planned later: else compilers would work for nothing."""
    asked: list[tuple[str, list[object], int]] = []
    cutting: list[bool] = []
    cut = Compilation.prepare

    def prepared(self: Compilation, forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        before = [str(graph.graph) for graph in (forward, backward)]
        cutting.append(True)
        cut(self, forward, backward)
        cutting.pop()
        assert before == [str(graph.graph) for graph in (forward, backward)], "the cut stays as it is"

    def ahead(_: Compilation, found: Partition, summed: Sequence[GradientSite]) -> None:
        asked.append(("ahead" if cutting else "planned", [r.program for r in found.regions], len(summed)))

    monkeypatch.setattr(prepare, "measures", lambda *_: bool(cutting))
    monkeypatch.setattr(Compilation, "prepare", prepared)
    monkeypatch.setattr(Compilation, "_prepare", ahead)
    module = nn.Sequential(nn.Linear(24, 40), nn.ReLU(), nn.Linear(40, 40), nn.ReLU(), nn.Linear(40, 8)).bfloat16()
    compiled(module)(torch.randn(130, 24).bfloat16()).float().square().mean().backward()
    assert [when for when, *_ in asked] == ["ahead", "ahead", "planned", "planned"]
    assert [what for _, *what in asked[:2]] == [what for _, *what in asked[2:]]
    assert all(programs for _, programs, _ in asked) and asked[1][2] == 3


def test_the_compilation_is_no_part_of_the_key_of_torchs_caches() -> None:
    x = torch.zeros(4, 4)
    options = Options(target="reference")
    made = [Partitioner(Compilation(options, resolve(options, [x]), [x])) for _ in range(2)]
    assert len({pickle.dumps(p) for p in (*made, copy.deepcopy(made[0]))}) == 1
