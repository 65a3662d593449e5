"""ReLU and GELU as epilogues of the products that stay with Inductor: which, and that they compute the same."""

from __future__ import annotations

import math
import operator

import pytest
import torch
from eager_regions import trace
from torch import Tensor, fx, nn

from tilestream.graph.capture import capture
from tilestream.graph.rewrites.gelus import join_gelus
from tilestream.graph.rewrites.operators import PADDED
from tilestream.graph.rewrites.pixels import to_pixels
from tilestream.graph.rewrites.table import rewrite
from tilestream.run import epilogues

aten = torch.ops.aten


def traced(net: nn.Module, rows: int) -> tuple[fx.GraphModule, tuple[Tensor, ...]]:
    names, parameters = zip(*net.named_parameters(), strict=True)
    inputs = (torch.randn(rows, next(net.children()).in_features).to(parameters[0].dtype), *parameters)  # pyright: ignore

    def run(x: Tensor, *values: Tensor) -> Tensor:
        return torch.func.functional_call(net, dict(zip(names, values, strict=True)), (x,))

    return trace(run, inputs), inputs


def products(graph: fx.GraphModule) -> list[fx.Node]:
    return graph.graph.find_nodes(op="call_function", target=aten._addmm_activation.default)


@pytest.mark.parametrize("depth", [64, 479])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_wide_layer_computes_the_same_with_the_epilogue(depth: int, dtype: torch.dtype):
    graph, inputs = traced(nn.Sequential(nn.Linear(depth, 1024), nn.ReLU(), nn.Linear(1024, 8)).to(dtype), 65)
    with torch.no_grad():
        want = graph(*inputs)
        assert epilogues.fuse(graph, {}) == 1
        (got,), (plain,) = graph(*inputs), want
    (product,) = products(graph)
    pads = graph.graph.find_nodes(op="call_function", target=PADDED)
    assert len(pads) == (depth % 8 != 0)
    assert all(len(p.args[0]) == 2 for p in pads)  # one kernel pads rows and weight
    assert (product.args[1].target is operator.getitem) == bool(pads)  # pyright: ignore
    assert not graph.graph.find_nodes(op="call_function", target=aten.relu.default)
    torch.testing.assert_close(got, plain)


def test_what_the_graph_computes_is_padded_where_it_is_made():
    """By Inductor, whose kernel of the sum writes the zeros too; the weight by a kernel of ours."""

    class Shifted(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x + 1)

    graph, inputs = traced(Shifted(nn.Linear(479, 1024), nn.ReLU()).bfloat16(), 65)
    with torch.no_grad():
        (want,) = graph(*inputs)
        assert epilogues.fuse(graph, {}) == 1
        (got,) = graph(*inputs)
    (own,) = graph.graph.find_nodes(op="call_function", target=PADDED)
    (inductors,) = graph.graph.find_nodes(op="call_function", target=aten.constant_pad_nd.default)
    assert own.args[0][0].op == "placeholder" and inductors.args[0].target is aten.add.Tensor  # pyright: ignore
    torch.testing.assert_close(got, want)


def test_a_view_of_what_is_given_is_given():
    with torch.no_grad():
        (graph,) = capture(Leading(nn.Linear(479, 1024)).bfloat16(), (torch.empty(5, 13, 479).bfloat16(),)).graphs
    assert epilogues.fuse(graph, {}) == 1
    (pad,) = graph.graph.find_nodes(op="call_function", target=PADDED)
    assert len(pad.args[0]) == 2  # pyright: ignore


@pytest.mark.parametrize(
    "net",
    [
        nn.Sequential(nn.Linear(479, 64), nn.ReLU()).bfloat16(),  # padding would take as long as it saves
        nn.Sequential(nn.Linear(64, 1001), nn.ReLU()).bfloat16(),  # results that lie at odd addresses
        nn.Sequential(nn.Linear(64, 64), nn.GELU()).half(),  # the library's is by tanh, which is too far from it
        nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.LayerNorm(64)).bfloat16(),  # the norm's kernel makes it
        nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU()).bfloat16(),
        nn.Sequential(nn.Linear(64, 64), nn.ReLU()),
    ],
)
def test_other_layers_are_left_alone(net: nn.Module):
    graph, _ = traced(net, 65)
    assert epilogues.fuse(graph, {}) == 0
    assert not products(graph)


GELUS = {
    "exact": (nn.GELU(), torch.bfloat16),
    "exact, behind it a dropout that is off": (nn.Sequential(nn.GELU(), nn.Dropout()).eval(), torch.bfloat16),
    "by tanh": (nn.GELU("tanh"), torch.float16),
}


@pytest.mark.parametrize("name", GELUS)
def test_gelu_is_as_near_to_float64_as_a_kernel_of_its_own(name: str):
    """On a GPU the library's is the one by tanh: that is held to here, whatever a CPU computes."""
    act, dtype = GELUS[name]
    graph, inputs = traced(nn.Sequential(nn.Linear(64, 256), act, nn.Linear(256, 8)).to(dtype), 300)
    with torch.no_grad():
        plain = graph(*inputs)[0]
        assert epilogues.fuse(graph, {}) == 1
        (product,) = products(graph)
        assert product.kwargs == {"use_gelu": True}
        got = graph(*inputs)[0]
        x, w1, b1, w2, b2 = (t.double() for t in inputs)
        hidden = x @ w1.T + b1
        exact = torch.nn.functional.gelu(hidden) @ w2.T + b2
        by_tanh = torch.nn.functional.gelu(hidden, approximate="tanh").to(dtype).double() @ w2.T + b2
    assert (got - exact).norm() <= 1.5 * (plain - exact).norm()
    assert (by_tanh.to(dtype) - exact).norm() <= 1.5 * (plain - exact).norm()


def test_weights_that_lie_inputs_first_have_the_epilogue():
    """GPT-2's layers, and its GELU, which is written out."""

    def run(x: Tensor, weight: Tensor, bias: Tensor, second: Tensor) -> Tensor:
        y = torch.addmm(bias, x, weight)
        y = 0.5 * y * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * torch.pow(y, 3.0))))
        return y @ second

    shapes = ((65, 64), (64, 256), (256,), (256, 8))
    inputs = tuple(torch.randn(s, generator=torch.Generator().manual_seed(1)).bfloat16() / 4 for s in shapes)
    graph = trace(run, inputs)
    with torch.no_grad():
        (plain,) = graph(*inputs)
        rewrite(graph, join_gelus)
        assert epilogues.fuse(graph, {}) == 1
        (got,) = graph(*inputs)
    assert not graph.graph.find_nodes(op="call_function", target=aten.tanh.default)
    exact = run(*(t.double() for t in inputs))
    assert (got - exact).norm() <= 1.1 * (plain - exact).norm()


def test_a_product_that_is_used_elsewhere_is_left_alone():
    layer = nn.Linear(64, 64).bfloat16()

    class Both(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            y = self[0](x)
            return y.relu() + y

    graph, _ = traced(Both(layer), 65)
    assert epilogues.fuse(graph, {}) == 0


@pytest.mark.parametrize("name", ["max_autotune", "max_autotune_gemm"])
def test_tuned_products_keep_their_own_epilogues(name: str):
    graph, _ = traced(nn.Sequential(nn.Linear(64, 64), nn.ReLU()).bfloat16(), 65)
    assert epilogues.fuse(graph, {name: True}) == 0
    assert epilogues.fuse(graph, {}) == 1


class OneByOne(nn.Module):
    """1 x 1 convolutions and ReLUs, channels last."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(16, 64, 1, bias=bias), nn.Conv2d(64, 24, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.two(self.one(x).relu()).relu()


@pytest.mark.parametrize("bias", [False, True])
def test_a_convolution_of_one_pixel_has_the_epilogue(bias: bool):
    """Without a bias it adds zeros: the same bits but for the order of sums."""
    model = OneByOne(bias).bfloat16().to(memory_format=torch.channels_last).eval()
    x = torch.randn(2, 16, 5, 6).bfloat16().contiguous(memory_format=torch.channels_last)
    with torch.no_grad():
        (graph,) = capture(model, (x,)).graphs
        want, values = model(x), [n.meta["val"] for n in graph.graph.find_nodes(op="placeholder")]
    rewrite(graph, to_pixels)
    assert epilogues.would_fuse(graph, {}, linears=False)
    assert not epilogues.would_fuse(graph, {"max_autotune": True})
    assert epilogues.fuse(graph, {}) == 2 and not epilogues.would_fuse(graph, {})
    given = {tuple(p.shape): p for p in (*model.parameters(), x)}
    with torch.no_grad():
        (got,) = graph(*[given[tuple(v.shape)] for v in values])
    assert len(products(graph)) == 2 and got.stride() == want.stride()
    torch.testing.assert_close(got, want)


class Leading(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


def test_rows_with_leading_dimensions_have_the_epilogue():
    """The product is of rows, and the ReLU of its view."""
    model = Leading(nn.Linear(64, 24)).bfloat16()
    with torch.no_grad():
        (graph,) = capture(model, (torch.randn(2, 5, 64).bfloat16(),)).graphs
        values = [torch.randn(n.meta["val"].shape).bfloat16() for n in graph.graph.find_nodes(op="placeholder")]
        (want,) = graph(*values)
        assert epilogues.fuse(graph, {}) == 1
        (got,) = graph(*values)
    assert len(products(graph)) == 1 and not epilogues.would_fuse(graph, {})
    torch.testing.assert_close(got, want)
