"""Messages summed by node in sorted order: which sums are replaced, and that they compute the same."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eager_regions import trace
from torch import Tensor, fx, nn

from tilestream.run import messages, prepare
from tilestream.run.backend import tilestream

aten = torch.ops.aten


class Sums(nn.Module):
    """``times`` sums of messages [E, features] along the same edges."""

    def __init__(self, times: int = 3, base: bool = False, alpha: float = 1.0) -> None:
        super().__init__()
        self.times, self.base, self.alpha = times, base, alpha

    def forward(self, v: Tensor, e: Tensor, to: Tensor) -> Tensor:
        for _ in range(self.times):
            v = (v if self.base else torch.zeros_like(v)).index_add(0, to, e, alpha=self.alpha)
            e = e * 2
        return v


def given(edges: int, nodes: int = 300, features: int = 64, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    torch.manual_seed(0)
    return (
        torch.randn(nodes, features).to(dtype),
        torch.randn(edges, features).to(dtype),
        torch.randint(nodes, (edges,)),
    )


def traced(module: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    return trace(lambda *values: module(*values), inputs)


def sorts(graph: fx.GraphModule) -> int:
    return len(graph.graph.find_nodes(op="call_function", target=messages.SEGMENTS))


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small graphs are worth it, too."""
    monkeypatch.setattr("tilestream.plan.messages.ATOMIC_US", 1.0)


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("base", [False, True])
def test_sums_are_replaced_and_share_one_sort(base: bool) -> None:
    module, inputs = Sums(base=base), given(2000)
    graph = traced(module, *inputs)
    assert messages.sort_messages(graph) == 3
    assert sorts(graph) == 1
    assert not graph.graph.find_nodes(op="call_function", target=aten.index_add.default)
    (got,) = graph(*inputs)
    exact = module(*(x.double() if x.is_floating_point() else x for x in inputs))
    error, own = ((x.double() - exact).norm() / exact.norm() for x in (got, module(*inputs)))
    assert error <= own and error < 4e-3
    assert torch.equal(got, graph(*inputs)[0])


@pytest.mark.parametrize(("edges", "times", "replaced"), [(200_000, 4, 4), (88_000, 1, 0), (500, 3, 0)])
def test_only_where_the_sort_pays(edges: int, times: int, replaced: int) -> None:
    with torch.device("meta"):
        graph = traced(Sums(times), *given(edges))
    assert messages.sort_messages(graph) == replaced


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (Sums(alpha=2.0), given(100)),
        (Sums(), given(100, features=9)),
        (Sums(), given(100, dtype=torch.float32)),
    ],
)
def test_others_are_left_alone(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    assert messages.sort_messages(traced(module, *inputs)) == 0


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("how", ["scatter_add", "scatter_add of views", "index_put"])
def test_other_ways_to_add(how: str) -> None:
    def add(v: Tensor, e: Tensor, to: Tensor) -> Tensor:
        zeros = torch.zeros_like(v)
        if how == "index_put":
            return zeros.index_put((to - len(v),), e, accumulate=True)
        column = to.unsqueeze(-1) if how == "scatter_add" else to.view(-1, 1)
        return zeros.scatter_add(0, column.expand_as(e), e)

    inputs = given(700)
    graph = trace(add, inputs)
    assert messages.sort_messages(graph) == 1
    torch.testing.assert_close(graph(*inputs)[0], add(*inputs), rtol=0.02, atol=0.05)


def test_segments() -> None:
    order, starts = messages.segments(torch.tensor([2, 0, 2, 4, 0, 2]), 5)
    assert order.tolist() == [1, 4, 0, 2, 5, 3] and starts.tolist() == [0, 2, 2, 5, 5, 6]
    order, starts = messages.segments(torch.tensor([], dtype=torch.int64), 3)
    assert starts.tolist() == [0, 0, 0, 0]
    order, starts = messages.segments(torch.tensor([-1, 0, -5, 4]), 5)
    assert order.tolist() == [1, 2, 0, 3] and starts.tolist() == [0, 2, 2, 2, 2, 4]
    for bad in (5, -6, 2**32):
        with pytest.raises(RuntimeError, match="outside of 5 nodes"):
            messages.segments(torch.tensor([0, bad]), 5)


@pytest.mark.usefixtures("cheap")
@pytest.mark.parametrize("dynamic", [False, True])
def test_compiled_beside_a_region(dynamic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.sums = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64)), Sums(2)

        def forward(self, v: Tensor, e: Tensor, to: Tensor) -> Tensor:
            return self.sums(v, self.net(e), to)

    torch._dynamo.reset()
    monkeypatch.setattr(prepare, "_analyses", [])
    seen: list[int] = []
    sort = messages.sort_messages
    monkeypatch.setattr(messages, "sort_messages", lambda graph: seen.append(sort(graph)))
    module = Block().bfloat16()
    fast: Any = torch.compile(module, backend=tilestream, options={"target": "reference"}, dynamic=dynamic)
    with torch.no_grad():
        for edges, nodes in ((700, 90), (500, 60)):
            inputs = given(edges, nodes)
            torch.testing.assert_close(fast(*inputs), module(*inputs), rtol=0.05, atol=0.05)
    assert seen and all(n == 2 for n in seen)
