"""Attention with masks that fused kernels do not take: compiled on a GPU its values, gradients and empty rows are those
of eager, and no product in float32 is left."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from tilestream.run import inductor
from tilestream.run.backend import tilestream

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("fresh")]

BATCH, HEADS, TOKENS, FEATURES = 4, 6, 96, 32
WIDTH = HEADS * FEATURES


def mask_of(kind: str, device: torch.device) -> Tensor:
    torch.manual_seed(1)
    if kind == "all":
        return (torch.arange(TOKENS, device=device)[:, None] >= 0).expand(BATCH, 1, TOKENS, TOKENS)
    if kind == "rows":  # some keep nothing
        kept = torch.rand(BATCH, 1, TOKENS, 1, device=device) < 0.8
        return kept.expand(BATCH, 1, TOKENS, TOKENS)
    bias = torch.randn(TOKENS, TOKENS, HEADS, device=device).bfloat16()
    bias[3], bias[4] = float("-inf"), torch.finfo(torch.bfloat16).min
    return bias.permute(2, 0, 1)[None]


class Layer(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.project = torch.nn.Linear(WIDTH, 3 * WIDTH)
        self.out = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = self.project(x).view(BATCH, TOKENS, 3, HEADS, FEATURES).permute(2, 0, 3, 1, 4).unbind(0)
        y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return x + self.out(y.transpose(1, 2).reshape(BATCH, TOKENS, WIDTH))


@pytest.mark.parametrize("training", [False, True])
@pytest.mark.parametrize("kind", ["all", "rows", "bias"])
def test_values_are_eagers(kind: str, training: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs: list[fx.GraphModule] = []
    right: Callable = inductor._inner

    def inner(gm: fx.GraphModule, *args: object, **kwargs: object) -> object:
        graphs.append(gm)
        return right(gm, *args, **kwargs)

    monkeypatch.setattr(inductor, "_inner", inner)
    torch.manual_seed(0)
    layer = Layer().cuda().bfloat16()
    x = torch.randn(BATCH, TOKENS, WIDTH, device="cuda").bfloat16()
    mask = mask_of(kind, x.device)
    run = torch.compile(layer, backend=tilestream, dynamic=False)
    with torch.set_grad_enabled(training):
        got, want = run(x, mask), layer(x, mask)
        exact = layer.double()(x.double(), mask.double() if mask.is_floating_point() else mask)
    layer.bfloat16()
    worst = (want - exact).abs().max()
    assert (got - exact).abs().max() <= 2 * worst + 1e-6
    assert not any("bmm" in str(n.target) for gm in graphs for n in gm.graph.nodes)
    if training:
        mine = torch.autograd.grad(run(x, mask).square().sum(), list(layer.parameters()))
        theirs = torch.autograd.grad(layer(x, mask).square().sum(), list(layer.parameters()))
        for one, other in zip(mine, theirs, strict=True):
            torch.testing.assert_close(one, other, rtol=0.1, atol=0.1 * float(other.abs().max()))
