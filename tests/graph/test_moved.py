"""A partition that was found in one copy of a graph, in another."""

from __future__ import annotations

import copy

import pytest
import torch
from modules import linear
from torch import fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tilestream.graph.capture import capture
from tilestream.graph.gradients import find_gradients
from tilestream.graph.moved import moved, text
from tilestream.graph.selection import partition


@pytest.fixture
def graph() -> fx.GraphModule:
    net = nn.Sequential(linear(24, 40), nn.ReLU(), linear(40, 8), nn.Flatten(0), nn.Unflatten(0, (-1, 8)), linear(8, 8))
    return capture(net.bfloat16(), [torch.randn(130, 24).bfloat16()]).graphs[0]


def test_a_copy_has_the_same_regions_of_its_own_nodes(graph: fx.GraphModule) -> None:
    other = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    assert text(other.graph) == text(graph.graph)
    found = partition(graph)
    there, _ = moved(found.cuts, (), other.graph)
    assert [cut.region for cut in there] == list(found.regions)
    for mine, theirs in zip(found.cuts, there, strict=True):
        assert [n.name for n in theirs.nodes] == [n.name for n in mine.nodes]
        assert {n.graph for n in (*theirs.nodes, *theirs.outputs)} == {other.graph}


def test_a_copy_has_the_same_weight_gradients() -> None:
    def step(dy: torch.Tensor, x: torch.Tensor) -> list[torch.Tensor]:
        return [dy.t() @ x, dy.sum(0), x.t() @ x]

    graph = make_fx(step, tracing_mode="fake")(*(torch.zeros(65, n).bfloat16() for n in (16, 24)))
    other = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    sites = find_gradients(graph.graph)
    _, there = moved((), sites, other.graph)
    assert [site.total is None for site in there] == [False, True]
    for mine, theirs in zip(sites, there, strict=True):
        assert [n.name for n in (*mine.nodes, mine.gradient, mine.input)] == [
            n.name for n in (*theirs.nodes, theirs.gradient, theirs.input)
        ]
        assert {n.graph for n in (*theirs.nodes, theirs.gradient, theirs.input)} == {other.graph}


def test_a_graph_with_another_operator_or_other_sizes_is_another(graph: fx.GraphModule) -> None:
    other = fx.GraphModule(graph, copy.deepcopy(graph.graph))
    relu = next(n for n in other.graph.nodes if n.target is torch.ops.aten.relu.default)
    relu.target = torch.ops.aten.tanh.default
    assert text(other.graph) != text(graph.graph)
    relu.target = torch.ops.aten.relu.default
    assert text(other.graph) == text(graph.graph)
    first = other.graph.find_nodes(op="placeholder")[0]
    first.meta = {**first.meta, "val": first.meta["val"].new_empty(131, 24)}
    assert text(other.graph) != text(graph.graph)
