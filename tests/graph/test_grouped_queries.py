"""Queries that share keys as rows of one head: where, and that attention computes the same."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from eager_regions import trace
from rewritten import counted
from shared_keys import BATCH, GROUPS, HEADS, POSITIONS, attended, operands, repeated
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from tilestream.apps import llama
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.rewrites.shared_keys import share_keys
from tilestream.graph.rewrites.table import When, rewrite
from tilestream.run import attention
from tilestream.run.backend import tilestream

aten = torch.ops.aten
MASKS = {
    "all sequences": torch.randn(1, POSITIONS),
    "all sequences, four dimensions": torch.randn(1, 1, 1, POSITIONS),
    "by sequence": torch.randn(BATCH, 1, 1, POSITIONS),
}


@pytest.mark.parametrize("mask", MASKS.values(), ids=list(MASKS))
def test_attention_reads_keys_that_are_not_repeated(mask: Tensor):
    inputs = (*operands(), mask)
    graph = trace(attended, inputs)
    (want,) = graph(*inputs)
    assert rewrite(graph, share_keys) == 1
    assert not graph.graph.find_nodes(op="call_function", target=aten.clone.default), "nothing is copied"
    (got,) = graph(*inputs)
    torch.testing.assert_close(got, want)


def test_a_mask_is_optional():
    inputs = operands()
    graph = trace(lambda q, k, v: F.scaled_dot_product_attention(q, repeated(k), repeated(v)), inputs)
    (want,) = graph(*inputs)
    assert rewrite(graph, share_keys) == 1
    torch.testing.assert_close(graph(*inputs)[0], want)


def turned(query: Tensor, key: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    """Heads and positions change places, and there are as many of either."""
    key, values = repeated(key).transpose(1, 2), repeated(values).transpose(1, 2)
    return F.scaled_dot_product_attention(query, key, values, attn_mask=mask)


def alone(query: Tensor, key: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(query[:, :GROUPS], key, values, attn_mask=mask)


def by_another_order(query: Tensor, key: Tensor, values: Tensor, mask: Tensor) -> Tensor:
    key, values = (x.repeat(1, HEADS // GROUPS, 1, 1) for x in (key, values))
    return F.scaled_dot_product_attention(query, key, values, attn_mask=mask)


@pytest.mark.parametrize(
    ("run", "inputs"),
    [
        (attended, (*operands(tokens=3), torch.randn(3, POSITIONS))),
        (attended, (*operands(), torch.randn(1, HEADS, 1, POSITIONS))),
        (attended, (*operands(positions=30), torch.randn(BATCH, 1, 1, 30))),  # its rows would start at odd addresses
        (turned, (*operands(positions=HEADS), torch.randn(1, HEADS))),
        (alone, (*operands(), MASKS["all sequences"])),
        (by_another_order, (*operands(), MASKS["all sequences"])),
    ],
)
def test_other_attention_is_left_alone(run: Callable[..., Tensor], inputs: tuple[Tensor, ...]):
    graph = trace(run, inputs)
    assert rewrite(graph, share_keys) == 0


def test_what_the_library_has_no_kernel_for_is_left_alone():
    inputs = (*operands(), MASKS["all sequences"])
    graph, asked = trace(attended, inputs), []
    assert rewrite(graph, share_keys, Settings(runs=lambda called, *given: asked.append(given))) == 0  # pyright: ignore
    ((args, kwargs),) = asked
    assert [tuple(x.shape) for x in args[:3]] == [(4, 1, 3, 16), (4, 1, 32, 16), (4, 1, 32, 16)]
    assert len(graph.graph.find_nodes(op="call_function", target=aten.clone.default)) == 2, "keys stay repeated"


def test_a_decoder_gives_the_same_values(fresh: None, monkeypatch: pytest.MonkeyPatch):
    found = counted(monkeypatch, When.AROUND_INFERENCE)
    sizes = llama.Sizes(
        batch=2, tokens=1, context=15, layers=1, width=48, heads=4, kv_heads=2, hidden=520, sdpa=True, layers_only=True
    )
    module = llama.module(sizes).bfloat16().eval()
    inputs = [x.bfloat16() if x.is_floating_point() else x for x in llama.inputs(sizes)]
    own = [[x.clone() for x in inputs] for _ in range(2)]
    with torch.no_grad():
        want = module(*own[0])
        got = torch.compile(module, backend=tilestream, options={"target": "reference"})(*own[1])
    torch.testing.assert_close(got, want, atol=0.03, rtol=0.03)
    torch.testing.assert_close(own[1], own[0], atol=0.03, rtol=0.03)  # the caches hold the new keys and values
    assert found == [3]  # two complex products are real, too


def test_a_library_that_refuses_is_asked_once(monkeypatch: pytest.MonkeyPatch):
    """Of tensors on a GPU, which are fake here."""
    with FakeTensorMode():
        fake = torch.empty(4, 1, 3, 16, device="cuda", dtype=torch.bfloat16)
    monkeypatch.setattr(attention, "real", lambda _: contextlib.nullcontext())
    monkeypatch.setattr(attention, "random_tensor", lambda x: torch.ones(x.shape))
    monkeypatch.setattr(attention, "_ran", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    asked: list[tuple[int, ...]] = []

    def takes(x: Tensor, causal: bool, scale: float) -> None:
        asked.append(tuple(x.shape))

    def refuses(x: Tensor, causal: bool, scale: float) -> None:
        asked.append(tuple(x.shape))
        raise RuntimeError("no valid plan")

    for called, works in ((takes, True), (refuses, False)):
        asked.clear()
        assert [attention.runs_here(called, [fake, False], {"scale": 0.5}) for _ in range(2)] == [works, works]
        assert asked == [(4, 1, 3, 16)]
