"""One layer that shares a tile, without a GPU: schedules, refusals, meaning, plans, selection, kernels that compile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from places import GOLDEN
from torch import nn

from tilestream import cuda, devices
from tilestream.apps.layers import Layer
from tilestream.errors import VerifyError
from tilestream.graph.capture import capture
from tilestream.graph.selection import Partition, partition
from tilestream.ir.axes import Level, Spread
from tilestream.ir.derive import exchanges
from tilestream.ir.pipeline import Pipeline, TileOp
from tilestream.ir.verify import verify
from tilestream.kernels.fits import verify_on
from tilestream.kernels.product.finder import is_block, is_projection
from tilestream.kernels.product.shared_tile import Tail, build
from tilestream.kernels.product.shared_tile.cost import shared_tile_cost
from tilestream.kernels.product.sharing import Middle
from tilestream.kernels.shape import KernelShape, kernel_shape
from tilestream.options import Options
from tilestream.plan import few_rows, planner
from tilestream.plan.passes.share_tile import Split, share_tile
from tilestream.reference.mesh_machine import Moved, run_meshes
from tilestream.reference.ops import FLOAT64
from tilestream.run import prepare
from tilestream.run.backend import tilestream

H200 = devices.get("h200")
LLAMA = Layer(2048, (2048, 512, 512), "rms")
BERT = Layer(768, (768,), bias=True, residual=True)
GATED = Layer(576, (1536,), act="silu", gated=True)
TEXT = GOLDEN / "shared_layer.cu"


def shared(layer: Layer, split: Split) -> Pipeline:
    made = share_tile(layer.program(), split)
    verify(made)
    return made


# -- schedules


@pytest.mark.parametrize(
    ("layer", "split", "widths", "rings"),
    [
        (LLAMA, Split(2, 64, tile_rows=16), (32, 8, 8), (128, 8, 8)),
        (LLAMA, Split(4, 32), (64, 16, 16), (128, 4, 4)),
        (LLAMA, Split(1, 128, Tail.NONE, tile_rows=8), (16, 8, 8), (128, 16, 16)),
        (BERT, Split(6, 16, Tail.CLUSTER, tile_rows=16), (48,), (128, 1, 1)),
        (replace(BERT, residual=False), Split(2, 48, tile_rows=16, depth=64), (16,), (64, 6, 6)),
    ],
)
def test_columns_and_rings_follow_from_the_mesh(layer: Layer, split: Split, widths, rings) -> None:
    p = shared(layer, split)
    s = build(p.stages[0], p)
    assert kernel_shape(p.stages[0]) is KernelShape.SHARED_TILE
    assert s.widths == widths and s.middle_columns == 0
    assert (s.depth, s.left_stages, s.weight_stages) == rings
    assert s.groups * s.group_columns >= layer.k and s.group_columns % s.depth == 0
    assert s.shared_bytes == sum(size for _, size in s.parts) <= H200.shared_bytes_per_cta
    verify_on(p, H200)


def test_groups_that_divide_the_sum_leave_the_norm_in_front_whole() -> None:
    for split, how in ((Split(2, 64), {"reduce-scatter"}), (Split(1, 128, Tail.NONE), set())):
        p = shared(LLAMA, split)
        assert {e.how for e in exchanges(p.stages[0])} == how
        assert {e.tile for e in exchanges(p.stages[0])} <= {"u0", "u1", "u2"}


def two_of_one_sum() -> Pipeline:
    program = Layer(520, (640,)).program()
    (stage,) = program.stages
    more = (TileOp("relu", replace(stage.ops[1].out, name="h"), ("u0",)), TileOp("store", None, ("h",), ("y0",)))  # pyright: ignore
    return program.with_stages((replace(stage, ops=(*stage.ops, *more)),))


def test_what_has_no_kernel_is_told_why() -> None:
    with pytest.raises(VerifyError, match="rows of 'r' go with one of 2 results"):
        share_tile(Layer(520, (640, 640), residual=True).program(), Split(1, 8, Tail.NONE))
    with pytest.raises(VerifyError, match="2 results are stored of its sum"):
        share_tile(two_of_one_sum(), Split(1, 8, Tail.NONE))
    for layer, split, why in (
        (BERT, Split(1, 8, Tail.NONE, middle=Middle.DSM), "one layer has no middle to hand over"),
        (replace(LLAMA, norm=""), Split(1, 8, Tail.NONE), "each CTA makes 384 > 256 columns of the result"),
        (BERT, Split(2, 8, Tail.REDUCE_ADD), "adds partial results in memory, but something is done to the sum"),
        (GATED, Split(2, 12), "groups add partial sums of one product, and its result is made of two"),
        (GATED, Split(1, 8, Tail.NONE), "each CTA makes 384 > 256 columns of the result"),
    ):
        p = share_tile(layer.program(), split)
        with pytest.raises(VerifyError, match=why):
            build(p.stages[0], p)
    p = shared(LLAMA, Split(2, 8))
    odd = p.with_stages((replace(p.stages[0], mesh=(Spread(Level.GRID, 8, ("u0.c",)),)),))
    with pytest.raises(VerifyError, match="a direction over u0.c is none of a shared tile's"):
        build(odd.stages[0], odd)


# -- meaning


@pytest.mark.parametrize(
    ("layer", "split"),
    [
        (Layer(40, (48, 24), "rms", bias=True), Split(3, 2)),
        (Layer(40, (48, 24), "layer", bias=True), Split(1, 3, Tail.NONE)),
        (Layer(40, (48,), act="gelu", residual=True), Split(2, 2, Tail.CLUSTER)),
        (Layer(40, (48,)), Split(2, 2, Tail.REDUCE_ADD)),
        (Layer(40, (48, 16)), Split(1, 2, Tail.NONE, tile_rows=8, row_tiles=2)),
    ],
    ids=str,
)
def test_the_reference_machine_computes_the_layer(layer: Layer, split: Split) -> None:
    tensors = {n: t.double() for n, t in layer.tensors(20).items()}
    got = run_meshes(shared(layer, split), tensors, FLOAT64, Moved())
    for name, want in layer.eager(tensors).items():
        torch.testing.assert_close(got[name], want, rtol=1e-12, atol=1e-12)


# -- plans


def test_a_layer_that_no_row_stream_holds_is_a_block() -> None:
    assert is_projection(LLAMA.program()) and is_block(LLAMA.program())
    assert not is_block(Layer(512, (512, 256)).program())


@pytest.mark.parametrize("rows", [1, 16, 128, 512])
def test_three_products_of_one_input_are_one_kernel_by_prediction(rows: int) -> None:
    made = planner.plan(LLAMA.program(), rows, H200, Options())
    assert made.chosen.strategy == few_rows.STRATEGY
    tails = {c.detail.split(", ")[-1] for c in made.candidates if c.pipeline is not None}
    alone = {few_rows.ONE_ROW} if rows == 1 else set[str]()  # without exchanges: the fastest there
    assert rows == 512 or {"partial sums in order", "sums over a cluster", "sums in one place"} | alone == tails
    assert (made.chosen.detail == few_rows.ONE_ROW) == (rows == 1)
    assert planner.plan(LLAMA.program(), 4096, H200, Options()).chosen.pipeline is None


def test_a_layer_costs_less_than_its_half_of_two() -> None:
    """More groups shorten the sum, and a second result costs its bytes."""

    def us(layer: Layer, split: Split) -> float:
        p = shared(layer, split)
        return shared_tile_cost(build(p.stages[0], p), 16, H200).seconds * 1e6

    few, many = Split(1, 64, Tail.NONE, tile_rows=16), Split(2, 64, Tail.CLUSTER, tile_rows=16)
    assert us(LLAMA, many) < us(LLAMA, few)
    assert us(Layer(2048, (512,)), many) < us(Layer(2048, (2048,)), many) < us(Layer(2048, (2048, 2048)), many)


# -- models


class Attention(nn.Module):
    """Norm, projections, something that mixes columns, the output's projection and the residual: [B, T, width]."""

    def __init__(self, width: int, narrow: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.q, self.k, self.v = (nn.Linear(width, n) for n in (width, narrow, narrow))
        self.o = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = self.norm(x)
        mixed = torch.cumsum(self.q(y), -1)
        return x + self.o(mixed), self.k(y) * self.v(y)


def cut(projections: bool) -> Partition:
    with torch.no_grad():
        graph = capture(Attention(528, 264).bfloat16().eval(), (torch.randn(2, 5, 528).bfloat16(),)).graphs[0]
    return partition(graph, projections=projections)


def test_projections_are_regions_where_asked_for() -> None:
    found = [[op.kind for op in r.program.stages[0].ops] for r in cut(True).regions]
    assert found == [
        ["load", "layer_norm", "linear", "linear", "linear", "store", "store", "store"],
        ["load", "linear", "load", "add", "store"],
    ]
    assert not any(is_projection(r.program) for r in cut(False).regions)


def test_torch_compile_runs_one_layer(fresh: None) -> None:
    class Three(Attention):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            y = self.norm(x)
            return self.q(y), self.k(y), self.v(y)

    model = Three(528, 264).bfloat16().eval()
    x = torch.randn(2, 5, 528).bfloat16()
    options = {"target": "reference", "strategy": "shared"}
    with torch.no_grad():
        got, near = torch.compile(model, backend=tilestream, options=options)(x), model(x)
        want = model.double()(x.double())
    (ran,) = [a for a in prepare.analyses() if a.plan is not None][-1:]
    assert ran.plan is not None and ran.plan.chosen.strategy == "shared" and is_projection(ran.program)
    for a, b, c in zip(got, near, want, strict=True):
        assert (a.double() - c).norm() < 2 * (b.double() - c).norm()


# -- kernels

KERNELS = [
    (LLAMA, Split(2, 64, Tail.CLUSTER, tile_rows=16)),
    (LLAMA, Split(4, 32)),
    (Layer(768, (768, 768, 768), "layer", bias=True), Split(1, 96, Tail.NONE, tile_rows=8)),
    (BERT, Split(2, 8, row_tiles=4)),
    (Layer(520, (77,), act="gelu", residual=True, dtype="f16"), Split(3, 2)),
    (GATED, Split(1, 16, Tail.NONE)),
    (Layer(640, (640,)), Split(3, 40, Tail.REDUCE_ADD, tile_rows=64)),
]


@pytest.mark.nvrtc
@pytest.mark.parametrize(("layer", "split"), KERNELS, ids=str)
@pytest.mark.every(3)
def test_kernels_compile_without_spills(layer: Layer, split: Split) -> None:
    assert [r.spills for r in cuda.compile_only(shared(layer, split))] == [0]


def golden_text() -> str:
    """What ``golden/shared_layer.cu`` holds: two results with biases, a norm in front."""
    layer = Layer(768, (768, 192), "layer", bias=True)
    return cuda.sources(share_tile(layer.program(), Split(4, 16, tile_rows=16)))[0].text


def test_text_of_a_kernel() -> None:
    assert golden_text() == TEXT.read_text(), "it changed; if that is meant, write it again: see golden_text"


def test_a_result_that_no_product_makes_is_refused() -> None:
    """As of a dropout that drops nothing, which training keeps beside the layer's result: nobody would store it."""
    program = Layer(520, (640,)).program()
    (stage,) = program.stages
    given = next(op for op in stage.ops if op.kind == "load")
    copied = replace(program.tensor("y0"), name="copied", axes=program.tensor(given.params[0]).axes)
    more = TileOp("store", None, (given.made.name,), ("copied",))
    p = replace(program, tensors=(*program.tensors, copied), stages=(replace(stage, ops=(*stage.ops, more)),))
    assert is_projection(program) and not is_projection(p)
    with pytest.raises(VerifyError, match="it stores 'copied', which no product makes"):
        share_tile(p, Split(1, 8, Tail.NONE))
