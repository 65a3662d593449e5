"""Keys and values that a model repeats for the queries that share them, in Dynamo's graph."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from test_settled_masks import attentions, called, settled
from torch import Tensor

from tilestream.graph.repeated_heads import share_heads

SHAPES = ((2, 6, 9, 16), (2, 2, 9, 16), (2, 2, 9, 16))
Run = Callable[..., Tensor]


def operands(dtype: torch.dtype = torch.bfloat16) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(dtype) for shape in SHAPES]


def repeated(x: Tensor, times: int = 3) -> Tensor:
    """As transformers does."""
    batch, heads, tokens, features = x.shape
    x = x[:, :, None, :, :].expand(batch, heads, times, tokens, features)
    return x.reshape(batch, heads * times, tokens, features)


def causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    at = torch.arange(q.shape[2], device=q.device)
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), at[:, None] >= at, scale=0.3)


def test_heads_are_not_repeated_where_the_mask_was_dropped() -> None:
    gm, _ = settled(causal, *operands())
    assert share_heads(gm) == 1
    (node,) = attentions(gm)
    assert node.kwargs["enable_gqa"] and node.kwargs["is_causal"] and node.kwargs["scale"] == 0.3
    for each in gm.graph.nodes:
        if "device" in each.kwargs:
            each.kwargs = each.kwargs | {"device": torch.device("cpu")}
    gm.recompile()
    wide = [x.double() for x in operands()]
    (got,) = called(gm, causal, wide)
    torch.testing.assert_close(got, causal(*wide), rtol=1e-12, atol=1e-12)
    assert share_heads(gm) == 0


def interleaved(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Other heads: queries 0 and 2 share one."""
    k, v = (x[:, None].expand(2, 3, 2, 9, 16).reshape(2, 6, 9, 16) for x in (k, v))
    return F.scaled_dot_product_attention(q, k, v)


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeated(k), repeated(v), q[..., :1] > 0)


def keys_alone(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.scaled_dot_product_attention(q, repeated(k), v.repeat(1, 3, 1, 1))


@pytest.mark.parametrize("run", [interleaved, masked, keys_alone])
def test_what_stays_repeated(run: Run) -> None:
    gm, _ = settled(run, *operands())
    assert share_heads(gm) == 0


def test_what_is_trained_and_float32_stay_repeated() -> None:
    gm, _ = settled(causal, *(x.requires_grad_() for x in operands()))
    assert share_heads(gm) == 0
    gm, _ = settled(causal, *operands(torch.float32))
    assert share_heads(gm) == 0
