"""Attention in a training step: what is found, what it becomes, and that gradients are eager's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from streamed import without_inductor
from torch import Tensor, fx, nn
from torch._dynamo.backends.common import aot_autograd
from whole_graphs import check

from tilestream.graph.nodes import results_of
from tilestream.graph.real import real
from tilestream.graph.settled import settle
from tilestream.graph.short_attention import GRADIENTS, SHORT
from tilestream.graph.trained_attention import Trained, put, trained_attentions
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.run import joint, prepare, trained_attention
from tilestream.run.backend import tilestream
from tilestream.run.trained_attention import sequences_each, trial

BATCH, HEADS, TOKENS, FEATURES = 4, 2, 9, 16
WIDTH = HEADS * FEATURES


class Layer(nn.Module):
    """Attention between two products, as timm has it; ``attend`` has queries, keys and values."""

    def __init__(self, attend: Callable[..., Tensor], keys: int = TOKENS) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.table = nn.Parameter(torch.randn(HEADS, TOKENS, TOKENS))
        self.mask = nn.Buffer(torch.randn(2, TOKENS, TOKENS).where(torch.rand(2, TOKENS, TOKENS) > 0.3, -1e2))
        self.attend, self.keys = attend, keys

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.first(x).view(BATCH, TOKENS, 3, HEADS, FEATURES).permute(2, 0, 3, 1, 4).unbind(0)
        k, v = k[:, :, : self.keys], v[:, :, : self.keys]
        return self.last(self.attend(self, q, k, v).transpose(1, 2).reshape(BATCH, TOKENS, WIDTH))


def plain(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q * 0.25) @ k.transpose(-2, -1)).softmax(-1) @ v


def scaled_behind(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ (k * 2.0).transpose(-2, -1) / 8).softmax(-1) @ v


def biased(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout((q @ k.transpose(-2, -1) * 0.25 + layer.table[None]).softmax(-1), 0.0) @ v


def shifted(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    scores = (q * 0.25) @ k.transpose(-2, -1) + layer.table[None]
    scores = scores.view(BATCH // 2, 2, HEADS, TOKENS, TOKENS) + layer.mask[None, :, None]
    return scores.view(-1, HEADS, TOKENS, TOKENS).softmax(-1) @ v


def library(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v)


def masked_library(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, layer.mask.view(1, 2, TOKENS, TOKENS).expand(BATCH, -1, -1, -1))


def in_float32(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q.float() @ k.float().transpose(-2, -1) * 0.25).softmax(-1) @ v.float()).to(v.dtype)


FOUND = {
    "plain": (plain, TOKENS, 0, False),
    "scaled behind the product": (scaled_behind, TOKENS, 0, False),
    "fewer keys than queries": (plain, 5, 0, False),
    "a bias that is learned": (biased, TOKENS, 1, True),
    "shifted windows": (shifted, TOKENS, 2, True),
    "in float32": (in_float32, TOKENS, 0, False),
    "a library's": (library, TOKENS, 0, False),
    "a library's, fewer keys": (library, 5, 0, False),
    "a library's with a mask": (masked_library, TOKENS, 1, False),
}


def step(layer: Layer, x: Tensor, change: Callable[[fx.GraphModule, int], object]) -> list[Tensor]:
    """The result and all gradients of a layer whose joint graph is changed."""
    return gradients(compiled_with(layer, change), layer, x)


def compiled_with(run: Callable[..., Tensor], change: Callable[[fx.GraphModule, int], object]) -> Any:
    """Compiled, operator by operator, with ``change`` to the joint graph."""
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def partition(graph: fx.GraphModule, inputs: Sequence[Any], num_fwd_outputs: int, **given: Any) -> Any:
        change(graph, num_fwd_outputs)
        return min_cut_rematerialization_partition(graph, inputs, num_fwd_outputs=num_fwd_outputs, **given)

    def as_is(graph: fx.GraphModule, _: Any) -> Any:
        return graph

    torch._dynamo.reset()
    backend = aot_autograd(fw_compiler=as_is, bw_compiler=as_is, partition_fn=partition, decompositions={})
    return torch.compile(run, backend=backend)


def gradients(run: Callable[..., Tensor], layer: Layer, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    given = x.detach().requires_grad_()
    y = run(given)
    (y.double() * torch.linspace(-1, 1, y.numel(), dtype=torch.float64, device=y.device).view(y.shape)).sum().backward()
    return [y.detach(), given.grad, *(p.grad for p in layer.parameters() if p.grad is not None)]  # pyright: ignore


def is_near(got: list[Tensor], layer: Layer, x: Tensor) -> bool:
    """Within twice the error of eager's, tensor by tensor."""
    eager = [t.double() for t in gradients(layer, layer, x)]
    exact = gradients(layer.double(), layer, x.double())
    layer.bfloat16()
    errors = [((a.double() - c).norm(), (b - c).norm(), c.norm()) for a, b, c in zip(got, eager, exact, strict=True)]
    return all(a <= 2 * b + 1e-3 * c for a, b, c in errors)


def replaced(into: list[Trained]) -> Callable[[fx.GraphModule, int], None]:
    """Puts our operators into a joint graph; ``into`` gets what was found."""

    def change(graph: fx.GraphModule, results: int) -> None:
        forward = [n for n in results_of(graph.graph)[:results] if isinstance(n, fx.Node)]
        into.extend(trained_attentions(graph, forward))
        for site in into:
            each = sequences_each(site)
            assert each is not None
            put(site, each)
        settle(graph)
        check(graph.graph, trained_attentions)  # pyright: ignore[reportArgumentType]
        ours = [n for n in graph.graph.nodes if n.target is SHORT]
        assert all(tuple(n.meta["val"].shape) == (BATCH, HEADS, TOKENS, FEATURES) for n in ours)
        left = {str(n.target) for n in graph.graph.nodes}
        assert not any("softmax" in name or "scaled_dot_product" in name for name in left)
        stacked = sum(n.target is torch.ops.aten.stack.default for n in graph.graph.nodes)
        assert stacked == (into[0].sizes[3] < TOKENS or into[0].scale == 0.125), "gradients lie as they are read"

    return change


@pytest.mark.parametrize("name", FOUND)
def test_gradients(name: str) -> None:
    attend, keys, terms, summed = FOUND[name]
    torch.manual_seed(0)
    layer, x = Layer(attend, keys).bfloat16(), torch.randn(BATCH, TOKENS, WIDTH).bfloat16()
    found: list[Trained] = []
    got = step(layer, x, replaced(found))
    (site,) = found
    assert site.sizes == (BATCH, HEADS, TOKENS, keys, FEATURES)
    assert (len(site.added), site.bias is not None) == (terms, summed)
    assert is_near(got, layer, x)


def test_many_queries() -> None:
    """Their keys' gradients come in parts, which the graph adds up."""

    def attended(q: Tensor, kv: Tensor) -> Tensor:
        k, v = kv.view(2, 20, 2, HEADS, FEATURES).permute(2, 0, 3, 1, 4).unbind(0)
        q = q.view(2, 140, HEADS, FEATURES).transpose(1, 2)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 140, WIDTH)

    def taken(graph: fx.GraphModule, results: int) -> None:
        (site,) = trained_attentions(graph, results_of(graph.graph)[:results])  # pyright: ignore
        put(site, sequences_each(site) or 0)
        settle(graph)
        check(graph.graph, trained_attentions)  # pyright: ignore[reportArgumentType]
        assert not any(n.target is torch.ops.aten.stack.default for n in graph.graph.nodes)

    q, kv = torch.randn(2, 140, WIDTH).bfloat16(), torch.randn(2, 20, 2 * WIDTH).bfloat16()
    leaves = [t.requires_grad_() for t in (q, kv)]
    doubles = [t.detach().double().requires_grad_() for t in leaves]
    runs = ((compiled_with(attended, taken), leaves), (attended, leaves), (attended, doubles))
    made = [torch.autograd.grad(run(*x).double().square().sum(), x) for run, x in runs]
    for got, eager, exact in zip(*made, strict=True):
        assert (got.double() - exact).norm() <= 2 * (eager.double() - exact).norm() + 1e-3 * exact.norm()


def causal(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def dropped(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout((q @ k.transpose(-2, -1)).softmax(-1), 0.5) @ v


def weights_are_read(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (q @ k.transpose(-2, -1)).softmax(-1)
    return weights @ v * weights.mean()


def learned_by_row(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.transpose(-2, -1) + layer.table[:, :1]).softmax(-1) @ v


def learned_and_scaled(layer: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return ((q @ k.transpose(-2, -1) + layer.table) * 0.5).softmax(-1) @ v


def keys_without_gradients(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.detach().transpose(-2, -1)).softmax(-1) @ v


def by_heads(_: Layer, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q.contiguous(), k, v)


@pytest.mark.parametrize(
    "attend", [by_heads, causal, dropped, weights_are_read, learned_by_row, learned_and_scaled, keys_without_gradients]
)
def test_what_is_left_alone(attend: Callable[..., Tensor]) -> None:
    torch.manual_seed(0)
    layer, x = Layer(attend).bfloat16(), torch.randn(BATCH, TOKENS, WIDTH).bfloat16()
    found: list[Trained] = []
    step(layer, x, lambda graph, n: found.extend(trained_attentions(graph, results_of(graph.graph)[:n])))  # pyright: ignore
    assert not found


def run_eagerly(graph: fx.GraphModule) -> Callable[..., Any]:
    return lambda values: graph(*values)


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What would be timed is ours, once it is found to mean what the graph does."""
    names: list[str] = []

    def win(asked: Any, options: Any, timer: Any) -> Any:
        with real(torch.device("cpu")):
            values = timer.trial.make()
            ours = timer.trial.call(asked.propose()[0], values)()
            for got, want in zip(ours, timer.trial.plain(*values), strict=True):
                assert torch.allclose(got.float(), want.float(), atol=0.1, rtol=0.1)
        names.append(asked.name)
        return SimpleNamespace(wins=True)

    kept = SimpleNamespace(measures=lambda *_: True, kernels_kept=prepare.kernels_kept)
    monkeypatch.setattr(trained_attention, "prepare", kept)
    monkeypatch.setattr(trained_attention, "choose", win)
    monkeypatch.setattr(trained_attention.fallback, "rest", run_eagerly)
    return names


@pytest.mark.parametrize("name", ["shifted windows", "a library's"])
def test_through_torch_compile(name: str, chosen: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    attend, keys, *_ = FOUND[name]
    without_inductor(monkeypatch)
    torch.manual_seed(0)
    layer, x = Layer(attend, keys).bfloat16(), torch.randn(BATCH, TOKENS, WIDTH).bfloat16()
    seen: list[set[Any]] = []
    cut = joint.Cutter.__call__

    def watched(self: Any, graph: fx.GraphModule, *given: Any, **named: Any) -> Any:
        seen.append({n.target for n in graph.graph.nodes})
        return cut(self, graph, *given, **named)

    monkeypatch.setattr(joint.Cutter, "__call__", watched)
    torch._dynamo.reset()
    options = {"target": "reference", "cache": False}
    got = gradients(torch.compile(layer, backend=tilestream, options=options), layer, x)
    assert chosen and {SHORT, GRADIENTS} <= seen[0]
    assert is_near(got, layer, x)
    chosen.clear()
    torch._dynamo.reset()
    gradients(torch.compile(layer, backend=tilestream, options=options | {"attention": False}), layer, x)
    assert not chosen and not {SHORT, GRADIENTS} & seen[1]


def test_a_trial_holds_ours_to_what_the_graph_means(monkeypatch: pytest.MonkeyPatch) -> None:
    """The meaning that both candidates are held to is the written attention's and its gradients'."""
    monkeypatch.setattr(trained_attention.fallback, "rest", run_eagerly)
    layer, x = Layer(shifted).bfloat16(), torch.randn(BATCH, TOKENS, WIDTH).bfloat16()
    asked: list[tuple[Trained, Any]] = []

    def look(graph: fx.GraphModule, results: int) -> None:
        forward = [n for n in results_of(graph.graph)[:results] if isinstance(n, fx.Node)]
        (site,) = trained_attentions(graph, forward)
        made = trial(site, 1)
        with real(torch.device("cpu")):
            values = made.make()
            as_written = made.call(Candidate(FALLBACK, None, None), values)()
            for got, want in zip(made.plain(*values), as_written, strict=True):  # pyright: ignore
                assert torch.allclose(got.float(), want.float(), atol=0.15, rtol=0.1)
        asked.append((site, values))

    step(layer, x, look)
    assert asked


@pytest.mark.gpu
@pytest.mark.parametrize("name", FOUND)
def test_on_a_gpu(name: str) -> None:
    """With whichever is the fastest, as near to float64 as eager."""
    attend, keys, *_ = FOUND[name]
    torch.manual_seed(0)
    layer, x = Layer(attend, keys).bfloat16().cuda(), torch.randn(BATCH, TOKENS, WIDTH).bfloat16().cuda()
    torch._dynamo.reset()
    got = gradients(torch.compile(layer, backend=tilestream), layer, x)
    assert is_near(got, layer, x)
