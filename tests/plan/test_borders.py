"""Regions with what Inductor fuses over their borders."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx, nn

from tilestream.graph.capture import capture
from tilestream.graph.selection import Partition, partition
from tilestream.plan.borders import surrounded

PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}


class Layers(nn.Module):
    """Two feed-forward layers with residuals, a norm, and a running sum, which no region holds, before each."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList([nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)) for _ in range(2)])

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.inner:
            x = (x + layer(x)).cumsum(0) / 8
        return x


def regions(module: nn.Module, *inputs: Tensor) -> tuple[fx.GraphModule, Partition]:
    with torch.no_grad():
        (graph,) = capture(module, inputs).graphs
    found = partition(graph)
    return graph, found


def test_neighbours_are_what_inductor_would_fuse():
    graph, found = regions(Layers().bfloat16().eval(), torch.randn(512, 64).bfloat16())
    around = surrounded(graph, {cut.region.name: cut.nodes for cut in found.cuts})
    inside = {node for cut in found.cuts for node in cut.nodes}
    assert len(found.cuts) == 2 and around
    for one in around.values():
        assert one.beside and not {n.target for n in one.beside} & {
            torch.ops.aten.mm.default,
            torch.ops.aten.addmm.default,
        }
    assert any(n not in inside for one in around.values() for n in one.beside)


class Noted(fx.Interpreter):
    """Runs a graph and keeps every value by its node's name."""

    def __init__(self, graph: fx.GraphModule) -> None:
        super().__init__(graph)
        self.known: dict[str, Any] = {}

    def run_node(self, n: fx.Node) -> Any:
        self.known[n.name] = super().run_node(n)
        return self.known[n.name]


def test_a_region_with_its_neighbours_computes_what_it_does_in_the_whole():
    torch.manual_seed(0)
    module, x = Layers().bfloat16().eval(), torch.randn(512, 64).bfloat16()
    graph, found = regions(module, x)
    weights = {tuple(p.shape): p for p in module.parameters()}
    given = [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
    noted = Noted(graph)
    with torch.no_grad():
        noted.run(*(x if v.shape == x.shape else weights[tuple(v.shape)] for v in given))
        for one in surrounded(graph, {cut.region.name: cut.nodes for cut in found.cuts}).values():
            own = [noted.known[n.name] for n in one.graph.graph.find_nodes(op="placeholder")]
            (output,) = one.graph.graph.find_nodes(op="output")
            (results,) = output.args
            assert isinstance(results, tuple) and results
            for got, node in zip(one.graph(*own), results, strict=True):
                assert isinstance(node, fx.Node) and torch.equal(got, noted.known[node.name])


def test_a_region_between_products_has_no_neighbours():
    module = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)).bfloat16().eval()
    graph, found = regions(module, torch.randn(512, 64).bfloat16())
    assert len(found.cuts) == 1
    assert surrounded(graph, {cut.region.name: cut.nodes for cut in found.cuts}) == {}
