"""Networks of edges that take in their sums: which, with what values, and where they stay two kernels."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilestream import devices
from tilestream.graph.capture import capture
from tilestream.graph.region import Region
from tilestream.options import Options
from tilestream.plan import messages
from tilestream.plan.find import find
from tilestream.run import oracle, other_ways
from tilestream.run.backend import tilestream
from tilestream.run.call import RegionCall
from tilestream.run.made_up import random_arguments
from tilestream.run.operator import REGION
from tilestream.run.other_ways import apart
from tilestream.run.spec import spec_of
from tilestream.run.target import Target

pytestmark = pytest.mark.usefixtures("without_inductor")

NODES, EDGES, FEATURES = 40, 300, 16


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sums pay, too."""
    monkeypatch.setattr(messages, "atomics_us", lambda _: 1e9)


class EdgeConv(nn.Module):
    """A network of what both ends of an edge have, and of edges' own rows if there are any."""

    def __init__(self, how: str = "amax", of_edges: int = 0, relu: bool = True, out: int = 24) -> None:
        super().__init__()
        self.how, self.relu, self.out = how, relu, out
        self.net = nn.Sequential(nn.Linear(2 * FEATURES + of_edges, 32), nn.ReLU(), nn.Linear(32, out))

    def forward(self, x: Tensor, edges: Tensor, e: Tensor | None = None) -> Tensor:
        own, other = x[edges[1]], x[edges[0]]
        rows = self.net(torch.cat([own, other - own, *([] if e is None else [e])], -1))
        places = edges[1][:, None].expand_as(rows)
        own_too = self.how == "sum"
        made = rows.new_zeros(len(x), self.out).scatter_reduce(0, places, rows, self.how, include_self=own_too)
        return made.relu() if self.relu else made


class Several(EdgeConv):
    """Two sums of one network."""

    def forward(self, x: Tensor, edges: Tensor, e: Tensor | None = None) -> Tensor:
        rows = self.net(torch.cat([x[edges[1]], x[edges[0]] - x[edges[1]]], -1))
        places = edges[1][:, None].expand_as(rows)
        most = rows.new_zeros(len(x), 24).scatter_reduce(0, places, rows, "amax", include_self=False)
        return torch.cat([most, rows.new_zeros(len(x), 24).scatter_add(0, places, rows)], -1)


class Kept(EdgeConv):
    """What edges have is a result, too."""

    def forward(self, x: Tensor, edges: Tensor, e: Tensor | None = None) -> Any:
        rows = self.net(torch.cat([x[edges[1]], x[edges[0]]], -1))
        return rows, rows.new_zeros(len(x), 24).index_add(0, edges[1], rows)


def given(of_edges: int = 0, nodes: int = NODES, count: int = EDGES, dtype: torch.dtype = torch.bfloat16) -> list[Any]:
    """Nodes, edges [2, edges] that leave out the last nodes, and rows of edges."""
    torch.manual_seed(0)
    ends = torch.randint(nodes - 5, (2, count))
    rows = [torch.randn(count, of_edges).to(dtype)] if of_edges else []
    return [torch.randn(nodes, FEATURES).to(dtype), ends, *rows]


def regions(module: nn.Module, inputs: list[Any], target: str = "reference") -> tuple[Region, ...]:
    (graph,) = capture(module.to(inputs[0].dtype), tuple(inputs)).graphs
    return find(graph, "inference", Options(target=target), devices.get("h200")).regions


def sums(region: Region) -> list[str]:
    """How a region's stores sum rows to nodes."""
    return [op.combine for op in region.program.stages[0].ops if op.receivers]


CASES: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "maximum and ReLU": (EdgeConv, 0),
    "maximum": (lambda: EdgeConv(relu=False), 0),
    "minimum": (lambda: EdgeConv("amin", relu=False), 0),
    "sum": (lambda: EdgeConv("sum", relu=False), 0),
    "mean": (lambda: EdgeConv("mean", relu=False), 0),
    "rows of edges": (lambda: EdgeConv(of_edges=8), 8),
    "several sums": (Several, 0),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(3)
def test_a_network_and_its_sums_are_one_region(name: str) -> None:
    make, of_edges = CASES[name]
    (region,) = (each for each in regions(make(), given(of_edges)) if sums(each))  # of a mean the division is apart
    assert sums(region) == {"several sums": ["max", "sum"], "minimum": ["min"]}.get(
        name, ["sum"] if name in ("sum", "mean") else ["max"]
    )
    kinds = [op.kind for op in region.program.stages[0].ops]
    assert kinds.count("relu") == 1 + (name in ("maximum and ReLU", "rows of edges"))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(6)
def test_values(name: str, dynamic: bool) -> None:
    """Also where lists change, and are longer, from call to call."""
    torch._dynamo.reset()
    make, of_edges = CASES[name]
    module = make().bfloat16()
    exact = copy.deepcopy(module).double()
    compiled = torch.compile(module, backend=tilestream, options={"target": "reference"}, dynamic=dynamic)
    for nodes, count in ((NODES, EDGES), (NODES, EDGES)) if not dynamic else ((NODES, EDGES), (70, 501)):
        inputs = given(of_edges, nodes, count)
        wide = [x.double() if x.is_floating_point() else x for x in inputs]
        with torch.no_grad():
            got, want, eager = compiled(*inputs), exact(*wide), module(*inputs)
        assert oracle.error(got, want) <= 2 * oracle.error(eager, want) + 1e-12


def test_the_region_alone_is_what_its_operators_make() -> None:
    """The fallback, which candidates are timed beside, is the same function of the arguments."""
    (region,) = regions(EdgeConv(of_edges=8), given(8))
    values = random_arguments(region)
    assert region.edges is not None
    order, receivers = values[region.edges.order], values[region.edges.receivers]
    assert (receivers[order.long()].diff() >= 0).all()
    (made,) = region.graph(*values)
    assert made.shape == (NODES, 24) and made.isfinite().all()


def test_rows_of_edges_are_taken_in_the_order_of_the_list() -> None:
    (region,) = regions(EdgeConv(of_edges=8), given(8))
    loads = {op.params for op in region.program.stages[0].ops if op.kind == "load"}
    assert any(index == "order" for _, index in loads)


def test_what_others_read_stays() -> None:
    assert not any(sums(region) for region in regions(Kept(), given()))


def test_odd_rows_of_edges_stay() -> None:
    assert not any(sums(region) for region in regions(EdgeConv(of_edges=5), given(5)))


def test_a_training_step_keeps_what_backward_reads() -> None:
    torch._dynamo.reset()
    module = EdgeConv(relu=False).bfloat16()
    exact = copy.deepcopy(module).double()
    x, edges = given()
    torch.compile(module, backend=tilestream, options={"target": "reference"})(
        x, edges
    ).float().square().mean().backward()
    exact(x.double(), edges).square().mean().backward()
    eager = copy.deepcopy(module)
    eager.zero_grad()
    eager(x, edges).float().square().mean().backward()
    for ours, want, theirs in zip(module.parameters(), exact.parameters(), eager.parameters(), strict=True):
        assert ours.grad is not None and want.grad is not None and theirs.grad is not None
        assert oracle.error(ours.grad, want.grad) <= 2 * oracle.error(theirs.grad, want.grad) + 1e-6


def test_predictions_decide() -> None:
    """A million edges: what is written and read again takes longer than the sums, but where that is little."""
    inputs = given(nodes=65_536, count=1 << 20)
    (region,) = regions(EdgeConv(out=64), inputs, "auto")
    assert sums(region) == ["max"]
    assert not any(sums(each) for each in regions(EdgeConv(out=8), inputs, "auto"))


def test_both_ways_are_the_same_function() -> None:
    """What is timed beside a network with its sums: a call of the network, and the sum."""
    inputs = given(of_edges=8)
    (graph,) = capture(EdgeConv(of_edges=8).bfloat16(), tuple(inputs)).graphs
    found = find(graph, "inference", Options(target="reference"), devices.get("h200"))
    (joined,) = found.networks
    region, here = joined.cut.region, Target("reference", torch.device("cpu"), devices.get("h200"))
    values = random_arguments(region)
    options = Options(target="reference")
    split = apart(region, options, here)
    assert len(split.graph.find_nodes(op="call_function", target=REGION)) == 2
    together = RegionCall(spec_of(region, region.program, "reference"), torch.device("cpu")).on_values(values)
    for ours, theirs in zip(split(*values), together, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=2e-2, atol=2e-2)
    again = found.apart([joined])
    assert {id(cut) for cut in again.cuts} == {id(joined.network), *map(id, joined.around)}
    assert len(again.exclusions) == len(again.outside)


def test_networks_that_are_slower_with_their_sums_are_apart_again(monkeypatch: pytest.MonkeyPatch) -> None:
    (graph,) = capture(EdgeConv().bfloat16(), tuple(given())).graphs
    found = find(graph, "inference", Options(target="reference"), devices.get("h200"))
    here = Target("reference", torch.device("cpu"), devices.get("h200"))
    for apart_wins in (True, False):
        monkeypatch.setattr(other_ways, "_is_faster_apart", lambda *_, wins=apart_wins: wins)
        assert bool(other_ways.fastest(found, Options(), here).cuts == found.cuts) is not apart_wins
