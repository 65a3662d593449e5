"""Weight gradients of backward graphs as calls of stationary sums: which are found, and what training gets."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from on_reference import compiled
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from tilestream.devices import get
from tilestream.graph import kept
from tilestream.graph.gradients import find_gradients
from tilestream.graph.nodes import aten, packet
from tilestream.graph.rewrites.joint import narrow_product, narrow_products, split_joined
from tilestream.graph.rewrites.normal_form import copy_views
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.rewrites.table import rewrite
from tilestream.ir.pipeline import Role
from tilestream.plan.gradient_launches import GradientLaunch, gradient_launches, gradient_sites
from tilestream.plan.gradients import Gradient, weight_gradients
from tilestream.plan.parts import RegionAnalysis
from tilestream.run import prepare
from tilestream.run.call import RegionCall
from tilestream.run.executable import plain
from tilestream.run.spec import sums_spec

ROWS = 130

pytestmark = pytest.mark.usefixtures("fresh")


def gradients(function: Callable[..., Tensor], module: nn.Module, *inputs: Tensor) -> list[Tensor]:
    module.zero_grad()
    target = torch.arange(ROWS).reshape(-1, 1).to(torch.float64) / ROWS
    (function(*inputs).double().reshape(ROWS, -1) - target).square().mean().backward()
    return [p.grad.clone() for p in module.parameters() if p.grad is not None]


def train(module: nn.Module, *inputs: Tensor) -> list[RegionAnalysis]:
    """One step compiled for the reference machine, whose gradients are right; the launches that ran."""
    before = len(prepare.analyses())
    got = gradients(compiled(module), module, *inputs)
    own = gradients(module, module, *inputs)
    wide = copy.deepcopy(module).double()
    exact = gradients(wide, wide, *(x.double() for x in inputs))
    for mine, eager, want in zip(got, own, exact, strict=True):
        error, allowed = ((g.double() - want).norm() for g in (mine, eager))
        assert error <= 2 * allowed + 1e-3 * want.norm()
        assert mine.stride() == eager.stride() and mine.dtype == eager.dtype
    return prepare.analyses()[before:]


def sums(found: Sequence[RegionAnalysis]) -> list[RegionAnalysis]:
    return [a for a in found if a.name.startswith("gradients")]


def mlp(bias: bool = True) -> nn.Sequential:
    return nn.Sequential(nn.Linear(24, 40, bias=bias), nn.ReLU(), nn.Linear(40, 8, bias=bias)).bfloat16()


@pytest.mark.parametrize("bias", [True, False])
def test_a_training_step_has_eagers_gradients(bias: bool) -> None:
    (launch,) = sums(train(mlp(bias), torch.randn(2, 65, 24).bfloat16()))  # both layers: one region makes both dY
    assert launch.rows == ROWS and len(launch.operators) == (4 if bias else 2)
    assert {t.shape for t in launch.program.by_role(Role.OUTPUT) if len(t.shape) == 2} == {(8, 40), (40, 24)}


class ByColumns(nn.Module):
    """Weights that lie ``[in, out]``, as in Hugging Face's GPT-2."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = (nn.Parameter(torch.randn(size).bfloat16() / 5) for size in ((24, 40), (40, 8)))
        self.bias = nn.Parameter(torch.randn(40).bfloat16())

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(torch.addmm(self.bias, x, self.first)) @ self.last


def test_weights_by_columns_have_eagers_gradients() -> None:
    """Autograd saves the transposed rows for them; here the rows are saved, and a launch sums over those."""
    found = sums(train(ByColumns(), torch.randn(ROWS, 24).bfloat16()))
    shapes = {t.shape for a in found for t in a.program.by_role(Role.OUTPUT) if len(t.shape) == 2}
    assert shapes == {(24, 40), (40, 8)}


class Joined(nn.Module):
    """Odd widths, a skip by concatenation, a slice of the gradient: what NeRF has."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(9, 16), nn.Linear(25, 13), nn.Linear(13 + 7, 3)

    def forward(self, x: Tensor, view: Tensor) -> Tensor:
        h = torch.cat([x, self.first(x).relu()], -1)
        return self.last(torch.cat([self.second(h), view], -1))


def test_parts_of_what_was_joined_and_odd_widths() -> None:
    found = train(Joined().bfloat16(), torch.randn(ROWS, 9).bfloat16(), torch.randn(ROWS, 7).bfloat16())
    saved = {t.features for t in found[0].program.by_role(Role.OUTPUT)}
    assert saved == {16, 13, 3}, "what was joined is not saved, but its parts"
    (launch,) = sums(found)
    assert len(launch.operators) == 5 + 3  # five products, since two operands had two parts each, and three sums
    assert all(t.features % 8 == 0 for t in launch.program.by_role(Role.INPUT))


def test_rows_that_change() -> None:
    module = mlp()
    fast = torch.compile(
        module, backend=compiled.__globals__["tilestream"], dynamic=True, options={"target": "reference"}
    )
    for rows in (ROWS, 65, 200):
        x = torch.randn(rows, 24).bfloat16()
        found = []
        for function in (fast, module):
            module.zero_grad()
            function(x).float().square().mean().backward()
            found.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=0.05, atol=0.05)
    assert len(sums(prepare.analyses())) == 1


def test_autocast_gets_fp32_sums() -> None:
    module, x = mlp().float(), torch.randn(ROWS, 24)
    own = gradients(module, module, x)
    with torch.autocast("cpu", torch.bfloat16):
        got = gradients(compiled(module), module, x)
    (launch,) = sums(prepare.analyses())
    assert {t.dtype for t in launch.program.by_role(Role.OUTPUT)} == {"f32"}
    for mine, want in zip(got, own, strict=True):
        assert mine.dtype == torch.float32
        torch.testing.assert_close(mine, want, rtol=0.05, atol=0.02)


def backward(*widths: int, rows: int = ROWS, dtype: torch.dtype = torch.bfloat16) -> fx.Graph:
    """dW and db of one layer after another, all of one dY each."""

    def run(dys: list[Tensor], xs: list[Tensor]) -> list[Tensor]:
        return [made for dy, x in zip(dys, xs, strict=True) for made in (dy.t() @ x, dy.sum(0, keepdim=True))]

    dys = [torch.zeros(rows, n, dtype=dtype) for n in widths[1:]]
    xs = [torch.zeros(rows, n, dtype=dtype) for n in widths[:-1]]
    return make_fx(run, tracing_mode="fake")(dys, xs).graph


def launches(graph: fx.Graph, least: int = 1) -> list[GradientLaunch]:
    return gradient_launches(gradient_sites(graph, get("h200"), least), get("h200"), [])


def test_which_gradients_are_streamed() -> None:
    (first, second) = launches(backward(24, 40, 8))
    assert [layer.bias for layer in (*first.layers, *second.layers)] == ["db0", "db0"]  # two inputs: not at one time
    assert launches(backward(24, 40), least=ROWS + 1) == []
    assert launches(backward(4096, 2048)) == []  # 16 x 16 blocks > 132 SMs
    assert find_gradients(backward(24, 40, dtype=torch.float32)) == []


def test_a_bias_of_queries_keys_and_values_that_are_one_layer() -> None:
    """Their gradients are put together by a copy, which product and sum read by views of their own."""

    def run(q: Tensor, k: Tensor, v: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        dy = torch.stack([q, k, v]).permute(1, 2, 0, 3).contiguous().view(ROWS, 72)
        return dy.t() @ x, dy.sum(0, keepdim=True)

    heads = [torch.randn(2, ROWS // 2, 24).bfloat16() for _ in range(3)]
    traced = make_fx(run, tracing_mode="fake")(*heads, torch.randn(ROWS, 40).bfloat16())
    assert rewrite(traced, copy_views) > 0
    (site,) = find_gradients(traced.graph)
    assert site.total is not None and packet(site.total) is aten.sum


def test_layers_of_a_launch_have_one_order() -> None:
    """Whichever the graph's is: before regions are placed, when kernels are begun, it is another than after."""
    sites = gradient_sites(backward(64, 64, 64, 32, 64, 8), get("h200"), 1)
    told = set()
    for order in (sites, sites[::-1], sites[2:] + sites[:2]):
        (launch,) = gradient_launches(order, get("h200"), [[site.gradient for site in sites]])
        told.add((launch.layers, tuple(node.name for node in launch.operands.values())))
    assert len(sites) == 5 and len({layers for layers, _ in told}) == 1


def test_launches_that_no_grid_holds_are_cut() -> None:
    found = launches(backward(*[1024] * 7))
    together = [Gradient("dy", f"x{n}", f"dw{n}", 1024, 1024) for n in range(4)]  # 32 blocks each
    assert sum(s.replicas for s in weight_gradients("w", together, get("h200")).stages) <= 132
    assert len(found) == 6 and all(len(launch.layers) == 1 for launch in found)


def joint(module: nn.Module, *inputs: Tensor) -> fx.GraphModule:
    """Forward and backward in one graph."""
    names, values = zip(*module.named_parameters(), strict=True)

    def step(values: tuple[Tensor, ...], *xs: Tensor) -> tuple[Tensor, ...]:
        made = torch.func.functional_call(module, dict(zip(names, values, strict=True)), xs)
        return torch.autograd.grad(made.square().sum(), values)

    return make_fx(step, tracing_mode="fake")(values, *inputs)


def test_a_product_with_parts_is_parts_of_a_product() -> None:
    module, x, view = Joined(), torch.randn(ROWS, 9), torch.randn(ROWS, 7)
    for dtype, count in ((torch.bfloat16, 2), (torch.float32, 0)):
        module, x, view = module.to(dtype), x.to(dtype), view.to(dtype)
        graph = joint(module, x, view)
        values = tuple(p.detach() for p in module.parameters())
        before = graph(values, x, view)
        assert rewrite(graph, split_joined, Settings(ROWS + 1)) == 0
        assert rewrite(graph, split_joined, Settings(ROWS)) == count
        graph.recompile()
        for got, want in zip(graph(values, x, view), before, strict=True):
            torch.testing.assert_close(got, want)


def test_columns_that_nobody_reads_are_not_computed() -> None:
    def run(dy: Tensor, weight: Tensor) -> Tensor:
        return (dy @ weight)[:, 2:-3] * 2

    given = torch.randn(ROWS, 8), torch.randn(8, 20)
    graph = make_fx(run, tracing_mode="fake")(*given)
    assert rewrite(graph, narrow_products) == 1
    graph.recompile()
    torch.testing.assert_close(graph(*given), run(*given))
    (product,) = [n for n in graph.graph.nodes if packet(n) is aten.mm]
    assert product.meta["val"].shape == (ROWS, 15)


def test_columns_between_those_that_are_read_stay() -> None:
    def run(dy: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        made = dy @ weight
        return made[:, 2:6] * 2, made[:, 9:12]

    given = torch.randn(ROWS, 8), torch.randn(8, 20)
    graph = make_fx(run, tracing_mode="fake")(*given)
    assert rewrite(graph, narrow_products) == 0
    (product,) = [n for n in graph.graph.nodes if packet(n) is aten.mm]
    assert rewrite(graph, lambda *_: narrow_product(product))
    for got, want in zip(graph(*given), run(*given), strict=True):
        torch.testing.assert_close(got, want)
    (product,) = [n for n in graph.graph.nodes if packet(n) is aten.mm]
    assert product.meta["val"].shape == (ROWS, 10)


@pytest.mark.parametrize("build", [None, plain])
def test_a_call(build: Any) -> None:
    """By the reference machine, and by plain operators where no kernel can be built; a batch of no rows is zero."""
    (launch,) = launches(backward(24, 40))
    call = RegionCall(sums_spec(launch, launch.pipeline(get("h200")), "reference"), torch.device("cpu"), build)
    dy, x = torch.randn(ROWS, 40).bfloat16(), torch.randn(ROWS, 24).bfloat16()
    weight, bias = call([dy, x])
    torch.testing.assert_close(weight, dy.t() @ x, rtol=0.02, atol=0.02)
    torch.testing.assert_close(bias, dy.sum(0), rtol=0.02, atol=0.02)


def test_a_batch_of_no_rows() -> None:
    (launch,) = launches(backward(24, 40))
    told = sums_spec(launch, launch.pipeline(get("h200")), "reference")
    weight, bias = RegionCall(told, torch.device("cpu"))([torch.zeros(0, n).bfloat16() for n in (40, 24)])
    assert torch.equal(weight, torch.zeros(40, 24).bfloat16()) and torch.equal(bias, torch.zeros(40).bfloat16())


@pytest.mark.parametrize("small", [0, kept.SMALL_BYTES])
def test_a_long_chain_keeps_few_gradients_at_once(small: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept, "SMALL_BYTES", small)
    layers = [m for _ in range(6) for m in (nn.Linear(136, 136), nn.ReLU())]
    found = train(nn.Sequential(*layers, nn.Linear(136, 8)).bfloat16(), torch.randn(ROWS, 136).bfloat16())
    _, *backward = [a for a in found if not a.name.startswith("gradients")]
    assert [len(a.program.by_role(Role.OUTPUT)) for a in backward] == ([6] if small else [3, 3])
    # The first has the last layer's too, of the tangent.
    assert [len(a.operators) for a in sums(found)] == ([14] if small else [8, 6])
