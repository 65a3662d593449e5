"""Attention over few keys on the GPU: against float64, the same bits every time, in graphs and in whole models."""

from __future__ import annotations

import pytest
import torch
from short_attentions import CASES, WHOLE_HEADS, Case, judged
from torch import Tensor

from tilestream.cuda.short_attention import attention
from tilestream.run.backend import tilestream
from tilestream.run.timing import capture

pytestmark = pytest.mark.gpu

LARGE = {
    "Swin-T's first, 16 images": Case(1024, 3, 49, 32, ((1, 3, 49, 49),)),
    "shifted": Case(1024, 3, 49, 32, ((1, 3, 49, 49), (64, 1, 49, 49))),
    "ViT-B, 8 images": Case(8, 12, 197, 64),
    "ViT-tiny, 64 images, f16": Case(64, 3, 197, 64, (), 0, torch.float16),
    "BERT with padding": Case(8, 12, 128, 64, ((8, 1, 1, 128),)),
    "MPNet": Case(8, 12, 128, 64, ((1, 12, 128, 128), (8, 1, 1, 128))),
    "256 keys": Case(4, 12, 256, 64),
}
EVERY = CASES | WHOLE_HEADS | {f"{name}, large": case for name, case in LARGE.items()}


@pytest.mark.parametrize("name", EVERY)
def test_values(name: str) -> None:
    case = EVERY[name]
    operands, terms, scale = case.operands("cuda"), case.terms("cuda"), case.features**-0.5
    q, k, v = operands
    for safe in (True, False):
        got = attention(q, k, v, terms, scale, safe)
        assert judged(got, case, operands, terms, scale, safe)
        assert torch.equal(got.nan_to_num(9.0), attention(q, k, v, terms, scale, safe).nan_to_num(9.0))
    graph = capture(lambda: attention(q, k, v, terms, scale, True))
    assert isinstance(graph.outputs, Tensor)
    graph.outputs.fill_(float("nan"))
    graph.graph.replay()
    assert torch.equal(graph.outputs, attention(q, k, v, terms, scale, True))


@pytest.mark.parametrize("name", ["swin_tiny_patch4_window7_224", "vit_tiny_patch16_224"])
def test_a_model(name: str) -> None:
    """With whichever attention is the fastest, within twice eager's error."""
    timm = pytest.importorskip("timm")
    torch.manual_seed(0)
    model, x = timm.create_model(name).eval().cuda(), torch.randn(4, 3, 224, 224, device="cuda")
    with torch.no_grad():
        want = model.double()(x.double())
        eager = model.bfloat16()(x.bfloat16()).double()
        got = torch.compile(model, backend=tilestream)(x.bfloat16()).double()
    assert (got - want).norm() <= 2 * (eager - want).norm()
