"""What Inductor saves by fusing operators of regions with their neighbours, as predicted."""

from __future__ import annotations

import torch
from torch import Tensor, fx, nn

from tilestream.devices import get
from tilestream.graph.capture import capture
from tilestream.graph.selection import partition
from tilestream.plan.borders import neighbours, saved_us

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


def regions(module: nn.Module, rows: int) -> tuple[fx.Graph, dict[str, tuple[fx.Node, ...]]]:
    with torch.no_grad():
        (graph,) = capture(module.bfloat16().eval(), [torch.randn(rows, 64).bfloat16()]).graphs
    return graph.graph, {cut.region.name: tuple(cut.nodes) for cut in partition(graph).cuts}


def test_neighbours_are_what_inductor_would_fuse():
    graph, found = regions(Layers(), 512)
    around = neighbours(list(graph.nodes), found)
    assert len(found) == 2 and around
    inside = {node for members in found.values() for node in members}
    assert all(others and not {n.target for n in others} & PRODUCTS for others in around.values())
    assert any(n not in inside for others in around.values() for n in others)


def test_what_is_saved_is_what_neighbours_need_not_read_again():
    """A kernel less, and the tensor at the border written and read once less."""
    h200, saved = get("h200"), []
    for rows in (65_536, 524_288):
        graph, found = regions(Layers(), rows)
        saved.append(saved_us(graph, found, h200, tf32=False))
        crossed = rows * 64 * 2 / h200.dram_bytes_per_s * 1e6
        assert crossed < saved[-1] < 8 * crossed + 20
    assert saved[1] > 4 * saved[0] > 0


def test_a_region_between_products_has_no_neighbours():
    graph, found = regions(nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, 64)), 512)
    assert len(found) == 1 and neighbours(list(graph.nodes), found) == {}
    assert saved_us(graph, found, get("h200"), tf32=False) == 0.0
