"""Experts: what a router chose is sorted by its few bits, counted by that, and tokens get back what was sorted away."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from eager_regions import trace
from rewritten import rewrite
from test_given_bounds import check
from test_messages_training import Step
from test_ragged_regions import Placed
from torch import Tensor, nn

from benchmarks.lib.masked_models import Experts
from tilestream.graph.rewrites.operators import SEGMENT_REDUCE, SEGMENTS
from tilestream.graph.rewrites.routing import count_small_keys, values_below
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.rewrites.sorted_sums import sort_sums
from tilestream.plan import messages
from tilestream.plan.messages import sorted_sums

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def _cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small sums pay, too."""
    monkeypatch.setattr(messages, "atomics_us", lambda _: 1e9)


def calls(graph: Any, *targets: Any) -> int:
    return sum(len(graph.graph.find_nodes(op="call_function", target=t)) for t in targets)


class Route(nn.Module):
    """What is routed where, in the ways that models write it."""

    def __init__(self, top: int = 2, cut: str = "floor") -> None:
        super().__init__()
        self.top, self.cut = top, cut

    def forward(self, x: Tensor, scores: Tensor) -> tuple[Tensor, ...]:
        shares, chosen = scores.softmax(-1).topk(self.top, dim=-1)
        expert, order = torch.sort(chosen.flatten(), stable=True)
        ones = torch.ones_like(expert, dtype=torch.int32)
        counts = torch.zeros(scores.shape[1], dtype=torch.int32).scatter_add(0, expert, ones)
        token = order // self.top if self.cut == "floor" else order.div(self.top, rounding_mode="trunc")
        rows = x[token] * shares.flatten()[order][:, None]
        return torch.zeros_like(x).index_add(0, token, rows), expert, counts, counts.cumsum(0, dtype=torch.int32)


@pytest.mark.parametrize("top", [1, 2, 3])
def test_routes_are_counted(top: int) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(50, 8), torch.randn(50, 7)
    graph = trace(Route(top), inputs)
    wanted = Route(top)(*inputs)
    assert rewrite(graph, count_small_keys, Settings(sums=sorted_sums)) == 1
    assert not calls(graph, aten.sort.stable, aten.scatter_add.default, aten.cumsum.default)
    for got, own in zip(graph(*inputs), wanted, strict=True):
        assert got.dtype == own.dtype
        torch.testing.assert_close(got, own)


@pytest.mark.parametrize("top", [1, 2])
@pytest.mark.parametrize("cut", ["floor", "trunc"])
@pytest.mark.every(2)
def test_tokens_get_back_what_was_sorted_away(top: int, cut: str) -> None:
    """Their order is the inverse of the one sort."""

    class Sum(Route):
        def forward(self, x: Tensor, scores: Tensor) -> Tensor:
            return super().forward(x, scores)[0]

    inputs = torch.randn(50, 8), torch.randn(50, 7)
    fast = check(Sum(top, cut), inputs, False)
    (graph,) = fast.graphs
    assert calls(graph, SEGMENTS) == (1 if cut == "floor" else 2) and fast.runners == ["segments"]


class Argsorted(nn.Module):
    """As transformers writes it: rows are repeated, sorted by expert, counted by a histogram, and sorted back."""

    def forward(self, x: Tensor, scores: Tensor) -> Tensor:
        shares, chosen = scores.softmax(-1).topk(2, dim=-1)
        token = torch.arange(len(x)).unsqueeze(1).expand(-1, 2).reshape(-1)
        expert = chosen.reshape(-1)
        order = torch.argsort(expert, stable=True)
        back = torch.argsort(order)
        counts = torch.histc(expert[order].float(), bins=7, min=0, max=6)
        ends = torch.cumsum(counts, 0, dtype=torch.int32)
        made = x[token][order] * shares.reshape(-1)[order][:, None] + ends.sum() + expert[order][:, None]
        return torch.zeros_like(x).index_add(0, token, made[back])


@pytest.mark.parametrize("training", [False, True])
def test_argsorted_experts(training: bool) -> None:
    """One sort of few bits; its inverse and where each token's rows lie need none."""
    torch.manual_seed(0)
    fast = check(Argsorted(), (torch.randn(50, 8), torch.randn(50, 7)), training)
    assert sum(calls(g, SEGMENTS) for g in fast.graphs) == 1
    assert not any(calls(g, aten.sort.stable, aten.sort.default, aten.histc.default) for g in fast.graphs)


def test_what_may_be_any_number_is_sorted_by_all_bits() -> None:
    def plain(keys: Tensor) -> Tensor:
        return keys.sort(stable=True)[1]

    def falling(x: Tensor) -> Tensor:
        return x.topk(2)[1].flatten().sort(descending=True, stable=True)[1]

    for module, given in ((plain, torch.randint(5, (9,))), (falling, torch.randn(4, 6))):
        graph = trace(module, (given,))
        assert rewrite(graph, count_small_keys, Settings(sums=sorted_sums)) == 0
        (sort,) = graph.graph.find_nodes(op="call_function", target=aten.sort.stable)
        assert values_below(sort.args[0]) == (None if module is plain else 6)


def test_what_is_no_whole_order_is_sorted() -> None:
    """Numbers from 1 on, places that leave room, and each number as often as no other: each is sorted by itself."""

    def shifted(x: Tensor, keys: Tensor) -> Tensor:
        order = keys.argsort(stable=True)
        back = torch.empty_like(order).index_put((order,), torch.arange(1, 1 + len(order)))
        return x.new_zeros(len(order) + 1, x.shape[1]).index_add(0, back, x)

    def wider(x: Tensor, keys: Tensor) -> Tensor:
        order = keys.argsort(stable=True)
        return x.new_zeros(len(order) + 5, x.shape[1]).index_add(0, order, x)

    def part(x: Tensor, keys: Tensor) -> Tensor:
        return x.new_zeros(4, x.shape[1]).index_add(0, keys.argsort(stable=True) // 3, x)

    given = torch.randn(10, 3), torch.randint(5, (10,))
    for module in (shifted, wider, part):
        graph = trace(module, given)
        assert rewrite(graph, sort_sums, Settings(sums=sorted_sums)) == 1 and calls(graph, SEGMENTS) == 1
        torch.testing.assert_close(graph(*given)[0], module(*given))


def model() -> tuple[Experts, tuple[Tensor, ...]]:
    torch.manual_seed(0)
    return Experts(4, 32, 16, 2).bfloat16(), (torch.randn(40, 32).bfloat16(),)


def test_experts() -> None:
    """One sort; the router chooses as in eager, whose choice float64 may not share."""
    module, inputs = model()
    fast = Placed(module, False)
    with torch.no_grad():
        torch.testing.assert_close(fast(*inputs), module(*inputs), rtol=2e-2, atol=2e-2)
    (graph,) = fast.graphs
    assert calls(graph, SEGMENTS) == 1 and not calls(graph, aten.sort.stable, aten.index_add.default)


def test_training_experts() -> None:
    module, (x,) = model()
    grads = []
    step = Step(module)
    for call in (module, step):
        module.zero_grad()
        leaf = x.clone().requires_grad_()
        call(leaf).float().square().mean().backward()
        grads.append([leaf.grad, *(p.grad.clone() for p in module.parameters())])
    for own, ours in zip(*grads, strict=True):
        torch.testing.assert_close(ours.float(), own.float(), rtol=5e-2, atol=float(own.abs().max()) * 2e-2)
    assert sum(calls(g, SEGMENTS) for g in step.graphs) == 1
    assert sum(calls(g, SEGMENT_REDUCE) for g in step.graphs) == 3
