"""Attention that a model writes out: what is found, what it becomes, and that values are eager's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx
from torch.nn.attention import SDPBackend, sdpa_kernel

from tilestream.devices import get
from tilestream.graph.capture import capture
from tilestream.graph.settled import settle
from tilestream.graph.written_attention import Written, terms, written_at
from tilestream.options import Options
from tilestream.plan import chooser
from tilestream.plan.candidates import FALLBACK
from tilestream.run import library_attention, oracle, prepare, written_attention
from tilestream.run.target import Target
from tilestream.run.timer import Timer
from tilestream.run.written_attention import OURS, WITH_BIAS, fuse_written, put

BATCH, HEADS, TOKENS, FEATURES = 4, 3, 9, 16
WIDTH = HEADS * FEATURES
SAFE = torch.ops.aten._safe_softmax.default
Run = Callable[..., Tensor]


def heads(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as views of one product: what timm has."""
    q, k, v = x.view(BATCH, TOKENS, 3, HEADS, FEATURES).permute(2, 0, 3, 1, 4).unbind(0)
    return q, k, v


def joined(y: Tensor) -> Tensor:
    return y.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH)


def plain(x: Tensor, *_: Tensor) -> Tensor:
    q, k, v = heads(x)
    return joined(((q * FEATURES**-0.5) @ k.transpose(-2, -1)).softmax(-1) @ v)


def biased(x: Tensor, bias: Tensor, *_: Tensor) -> Tensor:
    q, k, v = heads(x)
    return joined(F.dropout((q @ k.transpose(-2, -1) / 3 + bias[None]).softmax(-1), 0.1, False) @ v)


def shifted(x: Tensor, bias: Tensor, mask: Tensor, *_: Tensor) -> Tensor:
    """As Swin does it: windows of two kinds, of which each has a mask."""
    q, k, v = heads(x)
    scores = (q * FEATURES**-0.5) @ k.transpose(-2, -1) + bias[None]
    scores = scores.view(BATCH // 2, 2, HEADS, TOKENS, TOKENS) + mask[None, :, None]
    return joined(scores.view(-1, HEADS, TOKENS, TOKENS).softmax(-1) @ v)


def filled(x: Tensor, bias: Tensor, mask: Tensor, dropped: Tensor) -> Tensor:
    """As nanoGPT does it; then a factor for both, and a softmax in float32."""
    q, k, v = heads(x)
    scores = (q @ k.transpose(-2, -1) + bias).masked_fill(dropped, float("-inf")) * 0.5
    return joined(scores.softmax(-1, dtype=torch.float32).to(x.dtype) @ v)


def filled_low(x: Tensor, bias: Tensor, mask: Tensor, dropped: Tensor) -> Tensor:
    """With a number that is meant to be minus infinity, as transformers has it."""
    q, k, v = heads(x)
    scores = (q @ k.transpose(-2, -1) * 0.2).masked_fill(dropped, torch.finfo(x.dtype).min)
    return joined(scores.softmax(-1) @ v)


def by_pytorch(x: Tensor, bias: Tensor, *_: Tensor) -> Tensor:
    """What PyTorch makes of a bias of three dimensions: products of float32."""
    with sdpa_kernel(SDPBackend.MATH):
        return joined(F.scaled_dot_product_attention(*heads(x), bias))


WRITTEN: dict[str, Run] = {run.__name__: run for run in (plain, biased, shifted, filled, filled_low, by_pytorch)}


def operands(seed: int = 0) -> list[Tensor]:
    torch.manual_seed(seed)
    mask = torch.where(torch.rand(2, TOKENS, TOKENS) < 0.3, -100.0, 0.0)
    made = [torch.randn(BATCH, TOKENS, 3 * WIDTH), torch.randn(HEADS, TOKENS, TOKENS), mask]
    return [*(x.bfloat16() for x in made), torch.ones(TOKENS, TOKENS).triu(1).bool()]


def graph_of(run: Run, *inputs: Tensor) -> fx.GraphModule:
    with torch.no_grad():
        (gm,) = capture(run, inputs).graphs
    return gm


def sites(gm: fx.GraphModule) -> list[Written]:
    return [site for site in map(written_at, gm.graph.nodes) if site is not None]


def by_torch(query: Tensor, key: Tensor, value: Tensor, added: Tensor | None, *_: Any, scale: float) -> tuple[Tensor]:
    """What the library's kernel means, in float32; its results lie by token, as they do there."""
    scores = query.float() @ key.float().mT * scale + (0.0 if added is None else added.float())
    made = (scores.softmax(-1) @ value.float()).to(query.dtype)
    return (made.transpose(1, 2).contiguous().transpose(1, 2),)


def fused(gm: fx.GraphModule, name: str = WITH_BIAS) -> fx.GraphModule:
    """The graph with a kernel, which stands for itself on a CPU."""
    (site,) = sites(gm)
    put(site, name)
    settle(gm)
    for node in gm.graph.find_nodes(op="call_function", target=library_attention.EFFICIENT):
        node.target = by_torch
    gm.recompile()
    return gm


def called(gm: fx.GraphModule, run: Run, inputs: list[Tensor]) -> Tensor:
    """Arguments that are not used have no placeholder."""
    left = {(tuple(x.shape), x.dtype): x for x in inputs}
    held = [n.meta["val"] for n in gm.graph.find_nodes(op="placeholder")]
    return gm(*(left[tuple(h.shape), h.dtype] for h in held))[0]


@pytest.mark.parametrize("kernel", [WITH_BIAS, OURS])
@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.every(6)
def test_it_is_found_and_means_the_same(name: str, kernel: str) -> None:
    run, inputs = WRITTEN[name], operands()
    gm = graph_of(run, *inputs)
    before = {n.name: n.meta["val"].stride() for n in gm.graph.nodes if isinstance(n.meta.get("val"), Tensor)}
    (site,) = sites(gm)
    assert [site.query.meta["val"].stride(k) for k in (0, 1, 2)] == [TOKENS * 3 * WIDTH, FEATURES, 3 * WIDTH]
    assert site.is_plain == (name == "plain")
    gm = fused(gm, kernel)
    targets = {str(n.target) for n in gm.graph.nodes}
    assert not targets & {"aten.bmm.default", "aten._softmax.default"}
    for node in gm.graph.nodes:  # nobody behind it sees that the kernel's result lies otherwise
        if node.name in before and "clone" in node.name:
            assert node.meta["val"].stride() == before[node.name]
    got, eager, exact = (
        called(gm, run, inputs),
        run(*inputs),
        run(*(x.double() if x.is_floating_point() else x for x in inputs)),
    )
    assert got.stride() == eager.stride()
    assert oracle.error(got, exact) <= 2 * oracle.error(eager, exact)


SHAPES = {
    "plain": [],
    "biased": [(1.0, [1, HEADS, TOKENS, TOKENS])],
    "shifted": [(1.0, [1, HEADS, TOKENS, TOKENS]), (1.0, [2, 1, TOKENS, TOKENS])],
    "filled": [(0.5, [1, HEADS, TOKENS, TOKENS]), (0.5, [1, 1, TOKENS, TOKENS])],
    "filled_low": [(1.0, [1, 1, TOKENS, TOKENS])],
    "by_pytorch": [(1.0, [1, HEADS, TOKENS, TOKENS])],
}


@pytest.mark.parametrize("name", WRITTEN)
@pytest.mark.every(3)
def test_what_is_added_stays_apart(name: str) -> None:
    """Of all heads or sequences once, and of windows of two kinds twice."""
    (site,) = sites(graph_of(WRITTEN[name], *operands()))
    found = terms(site)
    assert found is not None and [one[1:] for one in found[0]] == SHAPES[name]


def test_what_differs_by_more_than_a_period_is_not_ours() -> None:
    def by_image(x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = heads(x)
        scores = (q @ k.transpose(-2, -1)).view(BATCH // 2, 2, HEADS, TOKENS, TOKENS) + mask[:, None, None]
        return joined(scores.view(-1, HEADS, TOKENS, TOKENS).softmax(-1) @ v)

    x, _, mask, _ = operands()
    (site,) = sites(graph_of(by_image, x, mask))
    assert terms(site) is None
    asked = written_attention.question(site, Target("cuda", torch.device("cuda"), get("h200")))
    assert OURS not in [c.strategy for c in asked.propose()]


@pytest.mark.parametrize("kernel", [WITH_BIAS, OURS])
def test_rows_that_keep_nothing_are_as_eagers(kernel: str) -> None:
    """Of minus infinity no number, and of what is meant to be that the mean of all values."""
    inputs = operands()
    inputs[3][2] = True
    gm = fused(graph_of(filled, *inputs), kernel)
    got, eager = called(gm, filled, inputs), filled(*inputs)
    assert got[:, 2].isnan().all() and eager[:, 2].isnan().all() and not got[:, 3:].isnan().any()
    assert not eager[:, 3:].isnan().any()
    inputs = operands()
    inputs[1][:, 3] = float("-inf")
    inputs[1][:, 4] = torch.finfo(torch.bfloat16).min
    (node,) = graph_of(by_pytorch, *inputs).graph.find_nodes(op="call_function", target=SAFE)
    assert node.args[1] == -1
    gm = graph_of(by_pytorch, *inputs)
    put(*sites(gm), WITH_BIAS)  # pyright: ignore[reportCallIssue]
    (rows,) = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.masked_fill.Scalar)
    assert rows.args[2] == float("-inf")
    gm = fused(graph_of(biased, *inputs), kernel)
    got, eager = called(gm, biased, inputs), biased(*inputs)
    assert got[:, 3].isnan().all() and eager[:, 3].isnan().all()
    torch.testing.assert_close(got[:, 4:], eager[:, 4:], rtol=0.05, atol=0.05)


def test_what_is_no_attention_stays() -> None:
    def returned(x: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = heads(x)
        weights = (q @ k.transpose(-2, -1)).softmax(-1)
        return weights @ v, weights

    def over_queries(x: Tensor) -> Tensor:
        q, k, v = heads(x)
        return (q @ k.transpose(-2, -1)).softmax(-2) @ v

    def activated(x: Tensor) -> Tensor:
        q, k, v = heads(x)
        return (q @ k.transpose(-2, -1)).relu().softmax(-1) @ v

    x = operands()[0]
    for run in (returned, over_queries, activated):
        assert not sites(graph_of(run, x))  # pyright: ignore[reportArgumentType]
    assert not sites(graph_of(plain, x.float()))


def as_it_lies(x: Tensor) -> Tensor:
    q, k, v = heads(x)
    return ((q @ k.transpose(-2, -1)).softmax(-1) @ v).view(BATCH * HEADS, TOKENS * FEATURES)


def test_who_looks_at_the_result_as_it_lay_gets_a_copy() -> None:
    x = operands()[0]
    gm = fused(graph_of(as_it_lies, x))
    torch.testing.assert_close(gm(x)[0], as_it_lies(x), rtol=0.05, atol=0.05)


@pytest.mark.parametrize("wins", [True, False])
def test_the_faster_one_runs(wins: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two equal layers one is timed; all kernels where nothing is added to scores."""
    asked: list[list[str]] = []

    def twice(x: Tensor) -> Tensor:
        return plain(plain(x).repeat(1, 1, 3))

    def measure(_: Timer, candidates: Any) -> list[float]:
        asked.append([c.strategy for c in candidates])
        return [10.0 if c.strategy == FALLBACK else 5.0 + 10 * (not wins) for c in candidates]

    chooser.forget()
    monkeypatch.setattr(prepare, "measures", lambda *_: True)
    monkeypatch.setattr(prepare, "kernels_kept", lambda *_: contextlib.nullcontext())
    monkeypatch.setattr(Timer, "__call__", measure)
    gm = graph_of(twice, operands()[0])
    target = Target("cuda", torch.device("cuda"), get("h200"))
    assert fuse_written(gm, Options(cache=False), target) == 2 * wins
    assert asked == [[*written_attention.KERNELS, OURS, FALLBACK]]
    assert fuse_written(gm, Options(cache=False, attention=False), target) == 0


@pytest.mark.gpu
@pytest.mark.parametrize("name", WRITTEN)
def test_kernels_compute_the_same(name: str) -> None:
    inputs = [x.cuda() for x in operands()]
    (site,) = sites(graph_of(WRITTEN[name], *inputs))
    target = Target("cuda", torch.device("cuda", 0), get("h200"))
    made = chooser.decide(written_attention.question(site, target), Timer(written_attention.trial(site), target))
    assert all(c.measured_us for c in made.candidates)


@pytest.mark.gpu
@pytest.mark.parametrize("kernel", [WITH_BIAS, OURS])
def test_rows_that_keep_nothing_on_a_gpu(kernel: str) -> None:
    inputs = [x.cuda() for x in operands()]
    inputs[1][:, 3] = float("-inf")
    inputs[1][:, 4] = torch.finfo(torch.bfloat16).min
    gm = graph_of(biased, *inputs)
    put(*sites(gm), kernel)  # pyright: ignore[reportCallIssue]
    settle(gm)
    got, eager = called(gm, biased, inputs), biased(*inputs)
    assert got[:, 3].isnan().all() and eager[:, 3].isnan().all()
    torch.testing.assert_close(got[:, 4:], eager[:, 4:], rtol=0.05, atol=0.05)
