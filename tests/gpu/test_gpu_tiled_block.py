"""Tiled blocks on the GPU: values, bits, any number of rows, launches one behind the other, graphs, torch.compile."""

from __future__ import annotations

import pytest
import torch
from shared_tiles import Ffn
from torch import nn

from tilestream import cuda, devices
from tilestream.apps.layers import Layer
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.kernels.product.shared_tile import Tail
from tilestream.plan.passes.share_tile import Split, share_tile
from tilestream.plan.passes.tile_block import tile_block
from tilestream.plan.turned import lying
from tilestream.run import prepare
from tilestream.run.backend import tilestream

pytestmark = pytest.mark.gpu

H200 = devices.get("h200")
VIT = Ffn(3072, 768, 768, act="gelu", bias=True, residual=True, norm="layer")
GATED = Ffn(520, 264, 272, gated=True, act="silu", bias=True, residual=True)
WIDE = Ffn(3072, 1024, 1024, act="silu", gated=True, norm="rms", residual=True)


def by_columns(layer: Layer) -> Pipeline:
    """The layer's program, whose weights lie ``[in, out]``."""
    program = layer.program()
    return lying(program, [t.name for t in program.tensors if t.role is Role.PARAMETER and len(t.shape) == 2])


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want).norm() / want.norm())


def check(block: Ffn, rows: int) -> None:
    kernel = cuda.build(tile_block(block.program(), H200))
    tensors = block.tensors(rows, "cuda")

    def run() -> torch.Tensor:
        y = torch.full((rows, block.out), float("nan"), device="cuda", dtype=tensors["x"].dtype)
        kernel(tensors, rows, out={"y": y})
        return y

    exact = block.eager({n: t.double() for n, t in tensors.items()})
    own, first = error(block.eager(tensors), exact), run()
    assert error(first, exact) <= 2 * own + 1e-4
    for _ in range(20):  # back to back: flags and rings of one launch are the next one's
        last = run()
    assert torch.equal(last, first)


@pytest.mark.parametrize("rows", [1, 129, 1000, 5000])
@pytest.mark.parametrize(
    "block",
    [GATED, Ffn(1000, 256, 200), Ffn(1032, 520, 520, act="gelu", norm="layer", residual=True, dtype="f16")],
    ids=str,
)
def test_any_number_of_rows(block: Ffn, rows: int) -> None:
    check(block, rows)


@pytest.mark.parametrize(
    "block", [VIT, Ffn(3072, 1024, 1024, act="silu", gated=True, norm="rms", residual=True)], ids=str
)
def test_rings_that_come_round(block: Ffn) -> None:
    check(block, 30_000)  # 235 tiles of rows; the rings hold 68 and 44


@pytest.mark.parametrize("rows", [1, 129, 5000])
@pytest.mark.parametrize(
    "layer",
    [
        Layer(768, (768, 768, 768), bias=True),
        Layer(1000, (520, 1032, 8), bias=True, act="gelu"),
        Layer(200, (1032,), bias=True, residual=True, dtype="f16"),
        Layer(576, (1536,), act="silu", gated=True),
        Layer(864, (320,), residual=True, stream="f32"),
        Layer(576, (576,), residual=True),
        Layer(264, (520,), bias=True, act="gelu", gated=True, residual=True),
    ],
    ids=str,
)
def test_a_layer_by_itself(layer: Layer, rows: int) -> None:
    kernel = cuda.build(tile_block(layer.program(), H200))
    tensors = layer.tensors(rows, "cuda")
    exact, eager = layer.eager({n: t.double() for n, t in tensors.items()}), layer.eager(tensors)
    first = kernel(tensors, rows)
    for name, want in exact.items():
        assert error(first[name], want) <= 2 * error(eager[name], want) + 1e-4
    for _ in range(20):
        last = kernel(tensors, rows)
    assert all(torch.equal(last[name], first[name]) for name in exact)


def test_other_rows_use_the_same_rings() -> None:
    kernel = cuda.build(tile_block(VIT.program(), H200))
    for rows in (20_000, 300, 9000, 20_000):
        tensors = VIT.tensors(rows, "cuda", seed=rows)
        got = kernel(tensors, rows)["y"]
        exact = VIT.eager({n: t.double() for n, t in tensors.items()})
        assert error(got, exact) <= 2 * error(VIT.eager(tensors), exact) + 1e-4


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(768), nn.Linear(768, 3072), nn.Linear(3072, 768)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def test_a_compiled_block_takes_it() -> None:
    """Where it is asked for: whether tiles or a library's products with GELU are faster is the timer's to say."""
    module = Block().cuda().bfloat16().eval().requires_grad_(False)
    x = torch.randn(16_384, 768, device="cuda").bfloat16()
    torch.compiler.reset()
    known = len(prepare.analyses())
    got = torch.compile(module, backend=tilestream, options={"strategy": "vertical"})(x)
    (analysis,) = prepare.analyses()[known:]
    assert "tiles over the grid" in analysis.plan.chosen.detail
    want = module(x)
    exact = module.double()(x.double())
    assert error(got, exact) <= 2 * error(want, exact)


@pytest.mark.parametrize("rows", [1, 129, 3000])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    "layer",
    [Layer(768, (3072,), bias=True, act="gelu"), Layer(264, (520,), act="silu", gated=True, residual=True)],
    ids=str,
)
def test_weights_that_lie_by_columns(layer: Layer, shared: bool, rows: int) -> None:
    """The bits of weights that lie by rows, which are read where they lie."""
    split = Split(1, 16 if layer.k == 768 else 9, Tail.NONE)
    given, by_rows = (
        share_tile(program, split) if shared else tile_block(program, H200)
        for program in (by_columns(layer), layer.program())
    )
    tensors = layer.tensors(rows, "cuda")
    lie = {t.name: tensors[t.name].t().contiguous().t() for t in given.tensors if t.by_columns}
    got = cuda.build(given)({**tensors, **lie}, rows)["y0"]
    exact = layer.eager({n: t.double() for n, t in tensors.items()})["y0"]
    assert error(got, exact) <= 2 * error(layer.eager(tensors)["y0"], exact) + 1e-4
    assert torch.equal(got, cuda.build(by_rows)(tensors, rows)["y0"])
