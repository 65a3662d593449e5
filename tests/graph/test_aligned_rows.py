"""Rows that bulk copies cannot address: which are copied for a row stream, what is computed, and how it is undone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

from tilestream import devices
from tilestream.graph.capture import capture
from tilestream.graph.nodes import aten, packet
from tilestream.graph.rewrites.aligned_rows import align_rows, unalign_rows
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.rewrites.table import rewrite
from tilestream.options import Options
from tilestream.plan.find import find

H200 = devices.get("h200")


class Net(nn.Module):
    """Two layers; ``turned``: of rows that lie transposed."""

    def __init__(self, columns: int, turned: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.turned = nn.Linear(columns, 128), nn.Linear(128, 64), turned

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x.t() if self.turned else x)))


def captured(module: nn.Module, x: Tensor) -> fx.GraphModule:
    with torch.no_grad():
        (graph,) = capture(module.bfloat16(), (x,)).graphs
    return graph


def pads(graph: fx.GraphModule) -> int:
    return sum(packet(n) is aten.constant_pad_nd for n in graph.graph.nodes)


@pytest.mark.parametrize(("columns", "rows", "turned", "expected"), [
    (100, 98_304, False, True),  # two chunks, element by element
    (60, 98_304, True, True),  # copied in any case
    (60, 98_304, False, False),  # one chunk, which a loader warp makes 16 bytes at a time
    (104, 98_304, False, False),  # bulk copies
    (600, 98_304, False, False),  # no row stream holds as many
])  # fmt: skip
@pytest.mark.every(2)
def test_rows_are_copied_where_loader_warps_would_take_longer(columns: int, rows: int, turned: bool, expected: bool):
    x = torch.randn((columns, rows) if turned else (rows, columns)).bfloat16()
    graph = captured(Net(columns, turned), x)
    found = find(graph, "inference", Options(), H200)
    assert pads(graph) == 2 * expected  # rows and weight
    if expected:
        (region,) = found.regions
        assert (-columns % 8 + columns,) in [t.shape for t in region.program.tensors]


def test_rows_that_the_graph_makes_are_not_copied() -> None:
    module = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 64))
    graph = captured(module, torch.randn(98_304, 64).bfloat16())
    find(graph, "inference", Options(), H200)
    assert pads(graph) == 0


def test_values_stay_and_what_no_region_takes_is_as_it_was() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(100, 64), nn.Linear(100, 32, bias=False)

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            return self.a(x), self.b(x)

    module, x = Both().bfloat16(), torch.randn(300, 100).bfloat16()
    graph = captured(module, x)
    before = [packet(n) for n in graph.graph.nodes]
    assert rewrite(graph, align_rows, Settings(aligns=lambda _: True)) == 2
    assert pads(graph) == 3  # both read one copy of the rows
    given = [*module.parameters(), x]
    by_shape = {tuple(t.shape): t for t in given}
    held = [by_shape[tuple(n.meta["val"].shape)] for n in graph.graph.nodes if n.op == "placeholder"]
    for made, wanted in zip(graph(*held), module(x), strict=True):
        torch.testing.assert_close(made, wanted, rtol=0.02, atol=0.02)
    assert rewrite(graph, unalign_rows) == 2
    assert sorted(map(str, before)) == sorted(str(packet(n)) for n in graph.graph.nodes)
