"""Attention over few keys on the GPU: against float64, the same bits every time, in graphs and in whole models."""

from __future__ import annotations

import pytest
import torch
from short_attentions import CASES, WHOLE_HEADS, Case, given_gradient, judged, judged_gradients
from torch import Tensor

from tilestream.cuda.short_attention import attention, gradients
from tilestream.kernels.operators.few_keys import Attention
from tilestream.kernels.operators.few_keys_gradients import each
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


TRAINED = {
    "Swin-T's first, 16 images": (LARGE["Swin-T's first, 16 images"], True),
    "shifted": (LARGE["shifted"], True),
    "BERT": (Case(8, 12, 128, 64), False),
    "BERT with padding": (LARGE["BERT with padding"], False),
    "CLIP-B/32": (Case(64, 12, 50, 64), False),
    "fewer keys, f16": (Case(40, 6, 100, 32, (), 49, torch.float16), False),
    "a long head": (Case(32, 2, 784, 32, (), 49), False),
    "a long head of 64": (Case(8, 5, 196, 64, ((8, 1, 1, 49),), 49), False),
    "a bias, 64 of 64": (Case(300, 2, 64, 64, ((1, 2, 64, 64),)), True),
}


@pytest.mark.parametrize("name", TRAINED)
def test_gradients(name: str) -> None:
    case, summed = TRAINED[name]
    operands, terms = case.operands("cuda"), case.terms("cuda")
    a = Attention(case.batches, case.heads, case.queries, operands[1].shape[2], case.features)
    for safe, sequences in ((True, each(a)), (False, 3)):
        given = [given_gradient(case, "cuda"), *operands, terms, case.features**-0.5, safe, summed, sequences]
        got = gradients(*given)
        assert judged_gradients(got, given)
        again = gradients(*given)
        assert all(torch.equal(x.nan_to_num(9.0), y.nan_to_num(9.0)) for x, y in zip(got, again, strict=True))


@pytest.mark.parametrize("rank", [3, 5])
def test_ranks_that_fused_kernels_do_not_take(rank: int) -> None:
    shape = {3: (64, 49, 32), 5: (4, 16, 2, 49, 32)}[rank]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def attended(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.nn.functional.scaled_dot_product_attention(q, k, v).square()

    run = torch.compile(attended, backend=tilestream)
    made = {}
    for which, f, leaves in (
        ("got", run, (q, k, v)),
        ("eager", attended, (q, k, v)),
        ("exact", attended, [t.detach().double().requires_grad_() for t in (q, k, v)]),
    ):
        y = f(*leaves)
        made[which] = [y, *torch.autograd.grad(y.double().sum(), leaves)]
    for got, eager, exact in zip(*made.values(), strict=True):
        assert (got - exact).norm() <= 2 * (eager - exact).norm() + 1e-3 * exact.norm()


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
