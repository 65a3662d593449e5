"""Attention without a mask, or causal, as our kernel of masked attention: which may be, and what it computes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from alternatives import are_timed, replaced
from eager_regions import trace
from torch import Tensor

from tilestream.graph.masked.op import MASKED
from tilestream.graph.rewrites.shared_keys import is_attention
from tilestream.run.tiled_attention import TILED_ATTENTION, fits


def operands(
    queries: int = 70, keys: int = 70, features: int = 32, heads: int = 4, key_heads: int = 4, device: str = "cpu"
) -> list[Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(2, n, h, features) for n, h in ((queries, heads), (keys, key_heads), (keys, key_heads))]
    return [t.to(device, torch.bfloat16).transpose(1, 2) for t in made]


def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, scale=0.3, enable_gqa=q.shape[1] != k.shape[1]).transpose(1, 2)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=gqa).transpose(1, 2)


@pytest.mark.parametrize(
    ("run", "inputs"),
    [(causal, operands()), (attended, operands(keys=90)), (causal, operands(key_heads=2))],
    ids=["causal", "other keys", "grouped"],
)
def test_it_takes_a_librarys_place_where_it_is_faster(
    run: Callable[..., Tensor], inputs: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    want = run(*inputs)
    for ours, taken in ((5.0, 1), (20.0, 0)):
        graph = trace(run, inputs)
        assert replaced(monkeypatch, graph, TILED_ATTENTION, lambda *_, ours=ours: [ours, 10.0]) == taken
        assert sum(n.target is MASKED for n in graph.graph.nodes) == taken
        torch.testing.assert_close(graph(*inputs)[0], want, atol=0.01, rtol=0.05)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, torch.ones(70, 70, dtype=torch.bool, device=q.device).tril())


@pytest.mark.parametrize(
    ("run", "inputs"),
    [
        (masked, operands()),
        (causal, operands(keys=90)),
        (causal, operands(features=24)),
        (causal, operands(features=144)),
        (attended, operands(queries=8)),
        (causal, [x.float() for x in operands()]),
    ],
    ids=["a mask", "causal, other keys", "24 features", "144 features", "few queries", "float32"],
)
def test_what_has_no_kernel_stays(run: Callable[..., Tensor], inputs: list[Tensor]) -> None:
    (node,) = [n for n in trace(run, inputs).graph.nodes if is_attention(n)]
    assert not fits(node)


@pytest.mark.gpu
@pytest.mark.parametrize("run", [causal, attended])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_both_compute_the_same(run: Callable[..., Tensor], key_heads: int) -> None:
    (node,) = [n for n in trace(run, operands(key_heads=key_heads, device="cuda")).graph.nodes if is_attention(n)]
    assert are_timed(node, TILED_ATTENTION)
