"""A partition that was found in one copy of a graph, in another."""

from __future__ import annotations

import copy

import pytest
import torch
from modules import linear
from torch import fx, nn

from tilestream.graph.capture import capture
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
    there = moved(found, other.graph)
    assert there.regions == found.regions and there.exclusions == found.exclusions
    for mine, theirs in zip(found.cuts, there.cuts, strict=True):
        assert [n.name for n in theirs.nodes] == [n.name for n in mine.nodes]
        assert {n.graph for n in (*theirs.nodes, *theirs.outputs)} == {other.graph}


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
