"""Attention of few queries on the GPU: against float64, the same bits every time, in graphs and in a decoder."""

from __future__ import annotations

import pytest
import torch
from attention_cases import BF16, F16, case, judged
from torch import Tensor

from tilestream.apps import llama
from tilestream.cuda.few_queries import attention
from tilestream.run.backend import tilestream
from tilestream.run.timing import capture

pytestmark = pytest.mark.gpu

CASES = [
    (8, 2, 128, 256, BF16, "one"),
    (256, 4, 64, 256, BF16, "one"),
    (300, 1, 32, 5, F16, ""),
    (5, 8, 256, 1000, BF16, "each"),
    (133, 3, 64, 4096, F16, "each"),
]


def on_gpu(t: Tensor | None) -> Tensor | None:
    return None if t is None else t.cuda()


@pytest.mark.parametrize("given", CASES, ids=str)
def test_values(given: tuple[int, int, int, int, torch.dtype, str]) -> None:
    q, k, v, mask = map(on_gpu, case(*given))
    assert q is not None and k is not None and v is not None
    got = attention(q, k, v, mask, q.shape[-1] ** -0.5)
    assert judged(got, q, k, v, mask)
    assert torch.equal(got, attention(q, k, v, mask, q.shape[-1] ** -0.5))
    graph = capture(lambda: attention(q, k, v, mask, q.shape[-1] ** -0.5))
    assert isinstance(graph.outputs, Tensor)
    graph.outputs.fill_(float("nan"))
    graph.graph.replay()
    assert torch.equal(graph.outputs, got)


@pytest.mark.parametrize("attention", [False, True])
def test_a_decoder(attention: bool) -> None:
    """Rewritten around its projections, with the library's attention and with ours where it is faster."""
    sizes = llama.Sizes(
        batch=3, tokens=1, context=63, layers=2, width=256, heads=8, kv_heads=2, hidden=1024, sdpa=True,
        layers_only=True, head_features=64, head_norms=True,
    )  # fmt: skip
    module = llama.module(sizes).bfloat16().cuda().eval()
    inputs = [(x.bfloat16() if x.is_floating_point() else x).cuda() for x in llama.inputs(sizes)]
    own = [[x.clone() for x in inputs] for _ in range(2)]
    with torch.no_grad():
        want = module(*own[0])
        got = torch.compile(module, backend=tilestream, options={"attention": attention})(*own[1])
    torch.testing.assert_close(got, want, atol=0.05, rtol=0.05)
    torch.testing.assert_close(own[1], own[0], atol=0.05, rtol=0.05)
