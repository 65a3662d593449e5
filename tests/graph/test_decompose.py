"""What Inductor is handed: graphs decomposed, through its own passes; and what happens where it fails."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from modules import Fn, linear
from on_reference import compiled
from streamed import eagerly
from torch import Tensor, fx, nn
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.exc import InductorError
from torch._inductor.lowering import lowerings
from torch._inductor.utils import fresh_cache
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.lib.recurrent_decoders import RecurrentDecoder
from tilestream.announce import STRICT
from tilestream.graph.own import OPERATORS
from tilestream.graph.rewrites.operators import JOINED
from tilestream.run import fallback, inductor, prepare
from tilestream.run.decompose import decomposed, simplified
from tilestream.run.operator import lower_operators

pytestmark = pytest.mark.usefixtures("fresh")


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The graphs that Inductor would be handed, which run operator by operator instead."""
    made: list[fx.GraphModule] = []

    def run(graph: fx.GraphModule, inputs: Any, kwargs: Any) -> tuple[Any, list[Any]]:
        made.append(simplified(graph, inputs))
        return eagerly(made[-1], inputs, kwargs)

    monkeypatch.setattr(inductor, "compile_inner", run)
    return made


def trained(function: Callable[..., Tensor], module: nn.Module, *inputs: Any) -> list[Tensor]:
    """The loss and the gradients of the module's parameters."""
    module.zero_grad()
    loss = function(*inputs)
    loss.backward()
    return [loss.detach(), *[p.grad.clone() for p in module.parameters() if p.grad is not None]]


def same(got: list[Tensor], want: list[Tensor]) -> None:
    assert len(got) == len(want) > 1
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.02)


# -- losses: Inductor's passes over joint graphs make tensors and trace ------------------------------------------------

ROWS = 37
LABELS = torch.arange(ROWS) % 5
LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "cross_entropy": lambda y: F.cross_entropy(y, LABELS),
    "cross_entropy, smoothed": lambda y: F.cross_entropy(y, LABELS, label_smoothing=0.1, ignore_index=2),
    "nll_loss": lambda y: F.nll_loss(y.log_softmax(-1), LABELS, reduction="sum") / ROWS,
    "gather": lambda y: -y.log_softmax(-1).gather(1, LABELS[:, None]).mean(),
    "multi_margin": lambda y: F.multi_margin_loss(y.float(), LABELS),
    "maximum": lambda y: y.max(-1).values.square().mean(),
    "topk": lambda y: y.topk(2).values.square().mean(),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.every(2)
def test_losses_of_labels(name: str, handed: list[fx.GraphModule]):
    net = nn.Sequential(linear(9, 13), nn.ReLU(), linear(13, 5)).bfloat16()
    x = torch.randn(ROWS, 9).bfloat16()

    def loss(x: Tensor) -> Tensor:
        return LOSSES[name](net(x)).float()

    same(trained(compiled(loss), net, x), trained(loss, net, x))
    assert len(handed) >= 1 and prepare.analyses()


# -- names: the code of a graph means what its nodes mean ------------------------------------------------------------


@pytest.mark.parametrize("turns", [1, 3, 6])
def test_inputs_that_are_called_as_operators_are(turns: int):
    """As values saved for a backward graph are: the new graph has operators of the same names, other ones of them."""
    graph = fx.Graph()
    inputs = [graph.placeholder(name) for name in ("permute", *(f"permute_{i}" for i in range(1, 6)))]
    turned = [graph.call_function(torch.ops.aten.t.default, (x,)) for x in inputs[:turns]]
    scaled = [graph.call_function(torch.ops.aten.mul.Tensor, (x, i + 1.0)) for i, x in enumerate(inputs)]
    graph.output((*turned, *scaled))
    values = [torch.randn(3, 5) for _ in inputs]
    mode = FakeTensorMode()
    made = decomposed(fx.GraphModule({}, graph), [mode.from_tensor(v) for v in values])
    want = [*(v.t() for v in values[:turns]), *(v * (i + 1.0) for i, v in enumerate(values))]
    for got, by_nodes, exact in zip(made(*values), fx.Interpreter(made).run(*values), want, strict=True):
        assert torch.equal(got, exact) and torch.equal(by_nodes, exact)


# -- layouts: Inductor saves neighbours of a convolution channels last, whatever the backward graph was traced with ----


def heads_joined() -> tuple[fx.GraphModule, Tensor, Tensor]:
    """A view that joins heads behind a saved value, and that value as it was traced and as it lies in memory."""
    graph, mode = fx.Graph(), FakeTensorMode()
    saved = graph.placeholder("saved")
    with mode:
        saved.meta["val"] = torch.empty(2, 7, 3, 5)
    twice = graph.call_function(torch.ops.aten.mul.Tensor, (saved, 2.0))
    graph.output((graph.call_function(torch.ops.aten.view.default, (twice, [2, 7, 15])),))
    traced = torch.randn(2, 7, 3, 5)
    return fx.GraphModule({}, graph), traced, traced.transpose(2, 3).contiguous().transpose(2, 3)


def test_a_view_of_what_was_saved_in_another_layout_is_a_copy():
    graph, traced, saved = heads_joined()
    mode = graph.graph.find_nodes(op="placeholder")[0].meta["val"].fake_mode
    made = decomposed(graph, [mode.from_tensor(saved)])
    assert torch.equal(made(saved)[0], 2 * traced.reshape(2, 7, 15))


def test_a_view_of_a_tensor_that_is_joined_with_none_is_a_copy():
    """As Bloom joins its keys with those of an empty cache: Inductor's decomposition keeps their strides."""
    net, x = linear(12, 12).bfloat16(), torch.randn(2, 5, 12).bfloat16()

    def joined(x: Tensor) -> Tensor:
        heads = net(x).relu().view(2, 5, 3, 4).transpose(1, 2)
        return torch.cat([torch.empty(0, dtype=x.dtype), heads], -2).reshape(6, 5, 4).relu()

    with torch.no_grad():
        torch.testing.assert_close(compiled(joined)(x), joined(x), rtol=0.05, atol=0.02)
    assert prepare.analyses()


def test_a_graph_that_runs_eagerly_is_given_the_layout_it_was_traced_with():
    graph, traced, saved = heads_joined()

    def fails(_: fx.GraphModule) -> Any:
        raise RuntimeError("no compiler")

    with pytest.raises(RuntimeError, match="view"):
        graph(saved)
    assert torch.equal(fallback.or_eager(fails, graph)([saved])[0], 2 * traced.reshape(2, 7, 15))


# -- subgraphs that are compiled once ---------------------------------------------------------------------------------


def blocks() -> tuple[Callable[[Tensor], Tensor], nn.Module]:
    """Three equal blocks, which ``nested_compile_region`` makes one subgraph, and a region behind them."""
    layers = nn.ModuleList([nn.Sequential(linear(9, 13), nn.ReLU(), linear(13, 9)) for _ in range(4)]).bfloat16()

    @torch.compiler.nested_compile_region
    def block(layer: nn.Module, x: Tensor) -> Tensor:
        return layer(x)

    def forward(x: Tensor) -> Tensor:
        for layer in layers[:3]:
            x = x + block(layer, x)
        return layers[3](x)

    return forward, layers


def test_subgraphs_are_decomposed_and_inductor_takes_them():
    forward, _ = blocks()
    x = torch.randn(37, 9).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(compiled(forward)(x), forward(x), rtol=0.05, atol=0.02)
    assert prepare.analyses()


def test_gradients_through_a_subgraph_that_is_called_twice(handed: list[fx.GraphModule]):
    forward, layers = blocks()
    x = torch.randn(37, 9).bfloat16()

    def loss(x: Tensor) -> Tensor:
        return forward(x).float().square().mean()

    same(trained(compiled(loss), layers, x), trained(loss, layers, x))
    graphs = [part for graph in handed for part in graph.modules() if isinstance(part, fx.GraphModule)]
    assert len(graphs) > len(handed) > 0
    left = {n.target for part in graphs for n in part.graph.nodes} & set(select_decomp_table())
    assert torch.ops.aten.t.default not in left


def test_results_that_nobody_wants_are_not_asked_for():
    """Of flex attention, Inductor's code for a CPU has the first two results of three."""
    from torch.nn.attention.flex_attention import flex_attention

    def forward(m: nn.Module, x: Tensor) -> Tensor:
        heads = m.layers[0](x).view(1, 37, 2, 8).transpose(1, 2)
        return m.layers[1](flex_attention(heads, heads, heads).transpose(1, 2).reshape(37, 16)).relu()

    net, x = Fn(forward, linear(9, 16), linear(16, 5)).bfloat16(), torch.randn(37, 9).bfloat16()
    with torch.no_grad():
        torch.testing.assert_close(compiled(net)(x), net(x), rtol=0.05, atol=0.02)
    assert prepare.analyses()


# -- operators of ours ------------------------------------------------------------------------------------------------


def test_inductor_was_told_of_every_operator_of_ours():
    """Where it was not, torch 2.11 writes out all that an operator reads, as deep as the model is."""
    net, x = RecurrentDecoder(layers=1, width=32, hidden=64, vocabulary=50).bfloat16().eval(), torch.tensor([5])
    before = [state.clone() for state in net.buffers()]
    with torch.no_grad(), torch._inductor.config.patch(implicit_fallbacks=False):
        got = compiled(net, cache=False)(x)
        for state, first in zip(net.buffers(), before, strict=True):
            state.copy_(first)
        torch.testing.assert_close(got, net(x), rtol=0.1, atol=0.05)
    assert prepare.analyses() and set(OPERATORS) <= set(lowerings)


def test_what_cannot_be_lowered_is_said_without_what_its_operands_were_made_of(monkeypatch: pytest.MonkeyPatch):
    """Which is twice as much a layer: Inductor would never have said it of a deep model."""

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError("no lowering today")

    def deep(x: Tensor) -> Tensor:
        for _ in range(8):
            x = x + JOINED([x, x])[:5]
        return x.cumsum(0)

    lower_operators()
    monkeypatch.setitem(lowerings, torch.ops.aten.cumsum.default, fails)
    with pytest.raises(InductorError, match="no lowering today") as failure, fresh_cache():
        torch.compile(deep, dynamic=False)(torch.randn(5))
    assert "aten.cumsum" in str(failure.value) and len(str(failure.value)) < 1000


# -- where Inductor fails ---------------------------------------------------------------------------------------------


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A machine without a C++ compiler, on which nothing was compiled before; no exception is ours."""
    monkeypatch.delenv(STRICT)
    monkeypatch.setattr("torch._inductor.cpp_builder.get_cpp_compiler", _no_compiler)
    with torch._inductor.config.patch(fx_graph_cache=False), torch._functorch.config.patch(enable_autograd_cache=False):
        yield


def _no_compiler() -> str:
    from torch._inductor.exc import InvalidCxxCompiler

    raise InvalidCxxCompiler


@pytest.mark.parametrize("target", ["auto", "reference"])
def test_without_a_compiler_inference_runs_eagerly(no_compiler: None, target: str, caplog: pytest.LogCaptureFixture):
    net = Fn(lambda m, x: m.layers[0](x).sin().cumsum(0).cos(), linear(9, 13)).bfloat16()
    x = torch.randn(37, 9).bfloat16()
    with torch.no_grad(), caplog.at_level(logging.WARNING, "tilestream"):
        torch.testing.assert_close(compiled(net, target=target, cache=False)(x), net(x), rtol=0.05, atol=0.02)
    assert "runs eagerly (InductorError: InvalidCxxCompiler" in caplog.text


@pytest.mark.parametrize("target", ["auto", "reference"])
def test_without_a_compiler_training_runs_eagerly(no_compiler: None, target: str, caplog: pytest.LogCaptureFixture):
    """Where the forward graph is a region and no more, Inductor is first asked for the backward graph."""
    net = nn.Sequential(linear(9, 13), nn.ReLU(), linear(13, 5)).bfloat16()
    x = torch.randn(37, 9).bfloat16()
    fast = compiled(net, target=target, cache=False)
    with caplog.at_level(logging.WARNING, "tilestream"):
        got = trained(lambda x: fast(x).float().square().mean(), net, x)
    same(got, trained(lambda x: net(x).float().square().mean(), net, x))
    assert "runs eagerly (InductorError: InvalidCxxCompiler" in caplog.text
