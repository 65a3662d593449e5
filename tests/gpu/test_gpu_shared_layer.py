"""One layer that shares a tile, on the GPU: values, bits, several results, and the user's model."""

from __future__ import annotations

import pytest
import torch

from tilestream import cuda
from tilestream.apps.layers import Layer
from tilestream.kernels.product.shared_tile import Tail
from tilestream.plan.passes.share_tile import Split, share_tile
from tilestream.run import prepare
from tilestream.run.backend import tilestream

pytestmark = pytest.mark.gpu


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


CASES = [
    (Layer(2048, (2048, 512, 512), "rms"), Split(2, 64, Tail.CLUSTER, tile_rows=16), (1, 16)),
    (Layer(2048, (2048, 512, 512), "rms"), Split(4, 32), (77, 128)),
    (Layer(768, (768, 768, 768), "layer", bias=True), Split(1, 96, Tail.NONE, tile_rows=8), (1, 8)),
    (Layer(768, (768,), bias=True, residual=True), Split(6, 16, Tail.CLUSTER), (100,)),
    (Layer(768, (768,), bias=True, residual=True), Split(2, 8, row_tiles=4), (500,)),
    (Layer(264, (48, 24, 24), bias=True), Split(2, 2, Tail.CLUSTER, tile_rows=32), (17, 31)),
    (Layer(520, (77,), "layer", act="gelu", residual=True, dtype="f16"), Split(3, 2), (5, 200)),
    (Layer(576, (1536,), act="silu", gated=True), Split(1, 16, Tail.NONE, row_tiles=8), (1000, 2048)),
    (Layer(264, (136,), bias=True, act="gelu", gated=True), Split(1, 2, Tail.NONE), (100,)),
    (Layer(640, (640,)), Split(3, 40, Tail.REDUCE_ADD, tile_rows=64), (33,)),
]


@pytest.mark.parametrize(("layer", "split", "counts"), CASES, ids=str)
def test_values_and_bits(layer: Layer, split: Split, counts: tuple[int, ...]) -> None:
    kernel = cuda.build(share_tile(layer.program(), split))
    for rows in counts:
        tensors = layer.tensors(rows, "cuda")
        exact = layer.eager({n: t.double() for n, t in tensors.items()})
        eager = layer.eager(tensors)

        def run(tensors=tensors, eager=eager, rows=rows) -> dict[str, torch.Tensor]:
            out = {name: torch.full_like(y, float("nan")) for name, y in eager.items()}
            kernel(tensors, rows, out=out)
            return out

        first = run()
        for _ in range(20):  # back to back: flags and partial results of one launch are the next one's
            last = run()
        for name, want in exact.items():
            assert error(last[name], want) <= 2 * error(eager[name], want) + 1e-4
            assert split.tail is Tail.REDUCE_ADD or torch.equal(first[name], last[name])


class Projections(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = torch.nn.RMSNorm(1024, eps=1e-6)
        self.q, self.k, self.v = (torch.nn.Linear(1024, n, bias=False) for n in (2048, 1024, 1024))
        self.o = torch.nn.Linear(2048, 1024, bias=False)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        y = self.norm(x)
        return x + self.o(torch.sin(self.q(y))), self.k(y), self.v(y)


def test_a_model_with_projections(fresh: None) -> None:
    torch.manual_seed(0)
    model = Projections().cuda().bfloat16().eval()
    x = torch.randn(1, 16, 1024, device="cuda", dtype=torch.bfloat16)
    options = {"strategy": "shared", "effort": "model"}
    with torch.no_grad():
        compiled = torch.compile(model, backend=tilestream, options=options)
        got, near = compiled(x), model(x)
        assert all(torch.equal(a, b) for a, b in zip(got, compiled(x.clone()), strict=True))
        want = model.double()(x.double())
    for a, b, c in zip(got, near, want, strict=True):
        assert error(a, c) <= 2 * error(b, c)
    chosen = [a.plan.chosen.strategy for a in prepare.analyses() if a.plan is not None]
    assert chosen[-2:] == ["shared", "shared"]
