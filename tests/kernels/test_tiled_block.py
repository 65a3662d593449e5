"""Feed-forward blocks on many rows as tiles of both products: schedule, pass, refusals, plans, selection, kernels."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import sass
import torch
from places import GOLDEN
from shared_tiles import Ffn
from torch import nn

from tilestream import cuda, devices, reference
from tilestream.apps.layers import Layer
from tilestream.errors import VerifyError
from tilestream.graph.capture import capture
from tilestream.graph.selection import partition
from tilestream.ir.axes import Loop
from tilestream.ir.pipeline import Pipeline
from tilestream.ir.verify import verify
from tilestream.kernels.families import why_no_kernel
from tilestream.kernels.fits import verify_on
from tilestream.kernels.product.shared_tile import Tail
from tilestream.kernels.product.tiled_block.code import TiledBlockCode
from tilestream.kernels.product.tiled_block.cost import tiled_block_cost
from tilestream.kernels.product.tiled_block.model import TiledBlock, build
from tilestream.kernels.shape import KernelShape, kernel_shape
from tilestream.options import Options
from tilestream.plan.candidates import prediction_of
from tilestream.plan.find import as_one_launch
from tilestream.plan.passes.share_tile import Split, share_tile
from tilestream.plan.passes.tile_block import tile_block
from tilestream.plan.planner import on_inductor, plan, proposals
from tilestream.plan.turned import lying

H200 = devices.get("h200")
TWO = replace(H200, clusters=((2, 2),))
"""A device of four SMs: what runs on the reference machine, and on the host, is small."""
VIT = Ffn(3072, 768, 768, act="gelu", bias=True, residual=True, norm="layer")
GATED = Ffn(520, 264, 272, gated=True, act="silu", bias=True, residual=True)
TEXT = GOLDEN / "tiled_block.cu"


def schedule(pipeline: Pipeline) -> TiledBlock:
    return build(pipeline.stages[0], pipeline)


# -- schedule


def test_a_block_of_a_vision_transformer() -> None:
    pipeline = tile_block(VIT.program(), H200)
    verify_on(pipeline, H200)
    assert kernel_shape(pipeline.stages[0]) is KernelShape.TILED_BLOCK and why_no_kernel(pipeline) == ""
    s = schedule(pipeline)
    assert (s.clusters, s.ctas, s.hid_blocks, s.out_blocks, s.first_steps, s.second_steps) == (66, 132, 12, 3, 12, 48)
    # a unit of the second product for each cluster a turn, and four of the first
    assert s.turn == 22 and s.turn * s.out_blocks == 66 and s.turn * s.hid_blocks == 4 * 66
    assert s.shared_bytes == 4 * 49_152 + 4 * 8192 + 192 <= H200.shared_bytes_per_cta
    assert s.slots == 2 * (22 + 2 * 6) and s.hidden_bytes == s.slots * 128 * 3072 * 2
    walk = s.walk(16_384)
    assert (walk.all_firsts, walk.all_seconds) == (64 * 12, 64 * 3)
    assert (walk.head, walk.firsts, walk.seconds, walk.early) == (264 + 66, 264, 66, 68)
    (_, flags), (_, hidden), (_, operand) = s.space.parts
    assert flags >= 8 * (132 + 68 * (32 + 24 + 6)) and hidden == s.hidden_bytes and operand == 68 * 128 * 768 * 2


def dealt(s: TiledBlock, rows: int) -> list[list[tuple[int, int]]]:
    """Of each cluster, its units in order: which product, which number (``Deal`` of tiled_order.cuh)."""
    w, made = s.walk(rows), []
    for cluster in range(s.clusters):
        first, second = cluster, (cluster - w.all_firsts) % s.clusters
        units: list[tuple[int, int]] = []
        while first < w.all_firsts or second < w.all_seconds:
            ahead = w.head + second // w.seconds * w.firsts
            if second < w.all_seconds and (first >= w.all_firsts or first >= ahead):
                units.append((1, second))
                second += s.clusters
            else:
                units.append((0, first))
                first += s.clusters
        made.append(units)
    return made


@pytest.mark.parametrize("rows", [1, 5000, 40_000])
@pytest.mark.parametrize(
    ("hid", "out"), [(3072, 768), (512, 512), (1000, 4096), (11_008, 4096), (256, 272), (4096, 520)]
)
def test_no_order_of_units_waits_for_itself(hid: int, out: int, rows: int) -> None:
    """Clusters that take their units in order, each as soon as what it is made from, or overwrites, is through."""
    s = schedule(tile_block(Ffn(max(hid, out), 512, out).program(), H200))
    waiting = [list(reversed(units)) for units in dealt(s, rows)]
    done: set[tuple[int, int]] = set()
    ring = s.slots // 2

    def ready(product: int, index: int) -> bool:
        pair = index // (s.out_blocks if product else s.hid_blocks)
        if product:
            return all((0, pair * s.hid_blocks + k) in done for k in range(s.hid_blocks))
        return pair < ring or all((1, (pair - ring) * s.out_blocks + k) in done for k in range(s.out_blocks))

    while any(waiting):
        through = [units.pop() for units in waiting if units and ready(*units[-1])]
        assert through, "all wait"
        done.update(through)
    walk = s.walk(rows)
    assert len(done) == walk.all_firsts + walk.all_seconds


@pytest.mark.parametrize("rows", [1, 700, 1025])
@pytest.mark.parametrize("block", [replace(GATED, out=264, norm="layer"), Ffn(1000, 256, 200, act="relu")])
@pytest.mark.every(3)
def test_the_reference_machine_runs_it(block: Ffn, rows: int) -> None:
    pipeline = tile_block(block.program(), TWO)
    verify(pipeline)
    tensors = block.tensors(rows)
    exact = block.eager({n: t.double() for n, t in tensors.items()})
    got = reference.run(pipeline, tensors)["y"]
    assert float((got.double() - exact).norm() / exact.norm()) < 2**-8


# -- one layer


QKV = Layer(768, (2304,), bias=True)
THREE = Layer(768, (768, 768, 768), bias=True)
OUT = Layer(768, (768,), bias=True, residual=True)
GATE_UP = Layer(576, (1536,), act="silu", gated=True)
"""SmolLM-135M's gate and up."""


@pytest.mark.parametrize("layer", [QKV, THREE])
def test_a_layer_is_the_second_product_alone(layer: Layer) -> None:
    pipeline = tile_block(layer.program(), H200)
    verify_on(pipeline, H200)
    assert kernel_shape(pipeline.stages[0]) is KernelShape.TILED_BLOCK and why_no_kernel(pipeline) == ""
    s = schedule(pipeline)
    # 9 blocks of columns over 66 clusters: 7 x 9 would leave three of them idle, 22 x 3 leaves none
    assert (s.clusters, s.hid_blocks, s.out_blocks, s.second_steps) == (66, 0, 9, 12)
    walk = s.walk(16_384)
    assert (walk.all_firsts, walk.head, walk.firsts) == (0, 0, 0) and walk.all_seconds == 64 * 9
    (_, flags), (_, hidden), (_, operand) = s.space.parts
    assert hidden == operand == 0 and flags >= 8 * 132


def test_a_gated_layer_has_half_of_its_accumulators_for_each_product() -> None:
    pipeline = tile_block(GATE_UP.program(), H200)
    verify_on(pipeline, H200)
    s = schedule(pipeline)
    assert (s.hid_blocks, s.out_blocks, s.second_steps) == (0, 12, 9) and s.block.products == 2
    assert (
        tiled_block_cost(s, 8192, H200).seconds
        < 0.7 * tiled_block_cost(schedule(tile_block(Layer(576, (1536, 1536)).program(), H200)), 16_384, H200).seconds
    )


@pytest.mark.parametrize("rows", [1, 700])
@pytest.mark.parametrize(
    "layer",
    [
        Layer(264, (264,), bias=True, residual=True),
        Layer(200, (264, 8), bias=True, act="gelu"),
        Layer(264, (248,), bias=True, act="gelu", gated=True, residual=True),
        Layer(200, (264,), residual=True, stream="f32"),
    ],
)
def test_the_reference_machine_runs_a_layer(layer: Layer, rows: int) -> None:
    pipeline = tile_block(layer.program(), TWO)
    verify(pipeline)
    tensors = layer.tensors(rows)
    got = reference.run(pipeline, tensors)
    for name, want in layer.eager({n: t.double() for n, t in tensors.items()}).items():
        assert float((got[name].double() - want).norm() / want.norm()) < 2**-8


STREAM = Layer(864, (320,), residual=True, stream="f32")
"""The second layer of a SwiGLU beside a float32 residual stream: 320 columns are two tiles of 256."""


def test_float32_results_leave_from_registers() -> None:
    s = schedule(tile_block(STREAM.program(), H200))
    assert s.direct and s.result_blocks == (2,)
    # four bytes an element and no room in shared memory: longer than 16 bits
    short = schedule(tile_block(replace(STREAM, stream="").program(), H200))
    assert not short.direct
    assert tiled_block_cost(short, 24_579, H200).seconds < tiled_block_cost(s, 24_579, H200).seconds


def test_results_that_are_made_otherwise_do_not_share_tiles() -> None:
    program = Layer(264, (264, 264), bias=True, act="relu").program()
    (stage,) = program.stages
    unlike = tuple(replace(op, kind="gelu") if op.out is not None and op.out.name == "h1" else op for op in stage.ops)
    with pytest.raises(VerifyError, match="what is done to its 2 results differs"):
        tile_block(program.with_stages((replace(stage, ops=unlike),)), H200)


def test_the_planner_tiles_a_layer_on_many_rows_alone() -> None:
    many = plan(OUT.program(), 16_384, H200, Options())
    assert "wide layers as tiles over the grid" in [c.detail for c in many.candidates if not c.rejected]
    few = plan(OUT.program(), 128, H200, Options())
    assert all("tiles over the grid" not in c.detail for c in few.candidates)


# -- what does not fit


@pytest.mark.parametrize(
    ("block", "why"),
    [
        (Ffn(1024, 260, 512), r"260 x 2 = 520 bytes along .* are no multiple of 16"),
        (Ffn(4096, 1032, 1032, norm="layer"), "rows of 1032 > 1024 columns stand in front of the first layer"),
        (
            Layer(768, (2304,), "layer", bias=True),
            "has one layer, and a warp that makes rows in front of it is slower than",
        ),
    ],
)
def test_what_no_kernel_is_made_of(block: Ffn | Layer, why: str) -> None:
    with pytest.raises(VerifyError, match=why):
        schedule(tile_block(block.program(), H200))


def test_another_mesh_or_another_loop_is_refused() -> None:
    pipeline = tile_block(GATED.program(), H200)
    (stage,) = pipeline.stages
    rows, hidden = stage.loops
    with pytest.raises(VerifyError, match=r"loops over 'rows' by 128 and .* by 128"):
        build(replace(stage, loops=(rows, Loop(hidden.axis, 256))), pipeline)
    with pytest.raises(VerifyError, match="mesh of a tiled block"):
        build(replace(stage, mesh=stage.mesh[:2]), pipeline)
    wide = replace(stage.mesh[1], size=1)
    with pytest.raises(VerifyError, match="1 workers divide 272 columns, of 256 each"):
        build(replace(stage, mesh=(stage.mesh[0], wide, stage.mesh[2])), pipeline)


def test_a_device_without_clusters_has_no_tiled_blocks() -> None:
    with pytest.raises(VerifyError, match="want as many clusters of 2, a100 holds 0"):
        tile_block(VIT.program(), devices.get("a100"))


# -- plans


def test_the_planner_takes_it_on_many_rows_alone() -> None:
    block = replace(VIT, act="silu")  # a library's product takes in a GELU
    many = plan(block.program(), 16_384, H200, Options())
    assert many.chosen.detail == "wide layers as tiles over the grid"
    few = plan(block.program(), 128, H200, Options())
    assert all("tiles over the grid" not in c.detail for c in few.candidates)
    narrow = plan(Ffn(1024, 256, 256, act="gelu").program(), 65_536, H200, Options())
    assert all("tiles over the grid" not in c.detail for c in narrow.candidates)


# -- models


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def kinds(model: nn.Module, rows: int, width: int) -> list[list[str]]:
    """Of each region, the kinds of its ops."""
    torch.compiler.reset()
    with torch.no_grad():
        (graph,) = capture(model.bfloat16().eval(), (torch.randn(rows, width).bfloat16(),)).graphs
    return [[op.kind for op in region.program.stages[0].ops] for region in partition(graph).regions]


def test_norm_block_and_residual_are_one_region() -> None:
    (found,) = kinds(Block(768, 3072), 1024, 768)
    assert found.count("linear") == 2 and "layer_norm" in found and found[-2:] == ["add", "store"]


class Attended(nn.Module):
    """A layer of a transformer, with something that mixes rows in attention's place: [batch, tokens, 768]."""

    def __init__(self, count: int) -> None:
        super().__init__()
        self.norm, self.out = nn.LayerNorm(768), nn.Linear(768, 768, bias=False)
        self.projections = nn.ModuleList(nn.Linear(768, 2304 // count) for _ in range(count))
        self.block = Block(768, 3072)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        made = torch.cat([p(y) for p in self.projections], -1).cumsum(1)
        return self.block(x + self.out(made[..., :768]))


@pytest.mark.parametrize("count", [1, 3])
def test_projections_and_their_residual_are_regions(count: int) -> None:
    torch.compiler.reset()
    with torch.no_grad():
        (graph,) = capture(Attended(count).bfloat16().eval(), (torch.randn(2, 512, 768).bfloat16(),)).graphs
    found = sorted([op.kind for op in r.program.stages[0].ops] for r in partition(graph, projections=True).regions)
    qkv = [["load", *["linear"] * count, *["store"] * count]] if count > 1 else []  # one alone is a library's
    # the sum of the residual goes with the layer in front of it, where it is computed once
    rest = [
        ["load", "layer_norm", "linear", "gelu", "linear", "add", "store"],
        ["load", "linear", "load", "add", "store"],
    ]
    assert found == sorted([*qkv, *rest])
    blocks = sorted([op.kind for op in r.program.stages[0].ops] for r in partition(graph).regions)
    assert [kinds.count("linear") for kinds in blocks] == [2]  # without projections, the block alone, and the sum in it
    assert blocks[0].count("add") == 2


class Streamed(nn.Module):
    """SwiGLU in bf16 beside a residual stream in float32."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(320, eps=1e-6)
        self.gate, self.up = (nn.Linear(320, 864, bias=False, dtype=torch.bfloat16) for _ in range(2))
        self.down = nn.Linear(864, 320, bias=False, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(x).to(torch.bfloat16)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y)).to(x.dtype)


def test_a_float32_residual_stream_is_in_the_block() -> None:
    torch.compiler.reset()
    with torch.no_grad():
        (graph,) = capture(Streamed().eval(), (torch.randn(24_579, 320),)).graphs
    (region,) = partition(graph, projections=True).regions
    assert [op.kind for op in region.program.stages[0].ops][-3:] == ["cast", "add", "store"]
    made = plan(region.program, region.rows, H200, Options())
    (tiled,) = [c for c in made.candidates if c.pipeline is not None]
    assert tiled.pipeline is not None and schedule(tiled.pipeline).direct
    # 156.7 us on an H200, where Inductor takes 154: the prediction takes it, and who times decides
    assert made.chosen == tiled and prediction_of(tiled) == pytest.approx(139.3, rel=0.01)


def test_rows_in_front_bound_a_block_of_short_products() -> None:
    """One warp of each CTA makes them, 1.4 us each, beside products that are longer or shorter. All warps make those of
    the first tiles, as many as the ring has."""
    blocks = (VIT, Ffn(864, 320, 320, act="silu", gated=True, norm="rms", residual=True))
    schedules = [schedule(tile_block(b.program(), H200)) for b in blocks]
    long, shorter = (tiled_block_cost(s, 24_579, H200) for s in schedules)
    assert long["streams"].seconds == long["work"].seconds
    assert shorter["streams"].seconds == shorter["rows"].seconds > 1.5 * shorter["work"].seconds
    late = 24_579 - schedules[1].slots * 128
    assert shorter["rows in front"].seconds == pytest.approx(late / 132 * 1.4e-6)


@pytest.mark.parametrize(("out", "columns", "blocks"), [(320, 192, 2), (384, 192, 2), (512, 256, 2), (576, 192, 3)])
def test_tiles_of_the_second_product_are_no_wider_than_they_need_be(out: int, columns: int, blocks: int) -> None:
    s = schedule(tile_block(Ffn(1536, out, out, act="gelu", residual=True).program(), H200))
    assert (s.second_columns, s.out_blocks) == (columns, blocks)


def test_all_of_the_first_product_is_in_front_where_the_ring_holds_all_rows() -> None:
    s = schedule(tile_block(Ffn(1536, 384, 384, act="gelu", norm="layer").program(), H200))
    held = s.slots * 128
    assert s.walk(held).head == s.walk(held).all_firsts > s.walk(held + 1).head
    assert s.walk(300).early == 4 and s.walk(held + 1).early == s.slots


@pytest.mark.parametrize(("width", "norm", "at_once"), [(320, "rms", (4, 2)), (768, "layer", (4, 1))])
def test_rows_are_made_several_at_once_where_registers_hold_them(
    width: int, norm: str, at_once: tuple[int, int]
) -> None:
    pipeline = tile_block(Ffn(1024, width, width, act="silu", norm=norm).program(), H200)
    assert TiledBlockCode(schedule(pipeline), pipeline).rows_at_once == at_once


class Gated(nn.Module):
    """``down(silu(gate(x)) * up(x)) + x``, whose weights of gate and up are two, or one."""

    def __init__(self, one: bool) -> None:
        super().__init__()
        width, hidden = 576, 1536
        self.gate = None if one else nn.Linear(width, hidden, bias=False)
        self.up = nn.Linear(width, 2 * hidden if one else hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, up = (self.gate(x), self.up(x)) if self.gate is not None else self.up(x).chunk(2, -1)
        return self.down(up * nn.functional.silu(gate)) + x


@pytest.mark.parametrize("one", [True, False])
def test_gate_and_up_are_one_layer_where_the_block_is_not_one_launch(one: bool) -> None:
    torch.compiler.reset()
    model = Gated(one).bfloat16().eval()
    with torch.no_grad():
        (graph,) = capture(model, (torch.randn(4, 512, 576).bfloat16(),)).graphs

    def found(**options) -> list[list[str]]:
        return [
            [op.kind for op in r.program.stages[0].ops] for r in partition(graph, projections=True, **options).regions
        ]

    (block,) = found()
    assert block.count("linear") == 3
    gated, down = found(pays=lambda _: False)
    assert gated.count("linear") == 2 and gated[-2:] == ["mul", "store"] and gated.count("store") == 1
    assert down == ["load", "linear", "load", "add", "store"]
    pays = partial(as_one_launch, options=Options(), device=H200)
    assert found(pays=pays) == [gated, down]
    made = [r.program for r in partition(graph, projections=True, pays=pays).regions]
    best = min(prediction_of(c) for c in proposals(made[0], 2048, H200, Options()) if c.pipeline is not None)
    assert best < 0.7 * (on_inductor(made[0], 2048, H200).predicted_us or 0.0)


def test_a_block_that_is_predicted_to_win_as_one_launch_is_kept() -> None:
    torch.compiler.reset()
    with torch.no_grad():
        (graph,) = capture(Block(768, 3072).bfloat16().eval(), (torch.randn(16_384, 768).bfloat16(),)).graphs
    pays = partial(as_one_launch, options=Options(), device=H200)
    assert len(partition(graph, projections=True, pays=pays).regions) == 1


def test_a_product_alone_is_a_librarys() -> None:
    torch.compiler.reset()
    with torch.no_grad():
        (graph,) = capture(nn.Linear(768, 768).bfloat16(), (torch.randn(1024, 768).bfloat16(),)).graphs
    assert partition(graph, projections=True).regions == ()


def test_a_norm_of_long_rows_stays_outside() -> None:
    (found,) = kinds(Block(1032, 2048), 1024, 1032)
    assert found.count("linear") == 2 and "layer_norm" not in found


def test_a_layer_that_a_row_stream_begins_with_stays_its_own() -> None:
    relu = nn.ReLU()
    model = nn.Sequential(nn.Linear(480, 1024), relu, nn.Linear(1024, 1024), relu, nn.Linear(1024, 512), relu)
    tail = nn.Sequential(nn.Linear(512, 256), relu, nn.Linear(256, 1))
    stream, block = sorted(kinds(nn.Sequential(model, tail), 2048, 480), key=lambda k: -k.count("linear"))
    assert (stream.count("linear"), block.count("linear")) == (3, 2)


# -- kernels


@pytest.mark.nvrtc
@pytest.mark.parametrize(
    "block",
    [VIT, GATED, QKV, THREE, GATE_UP, STREAM, Layer(200, (1032,), bias=True, residual=True, dtype="f16")],
    ids=["norm", "gated", "layer", "layers", "gated layer", "float32 stream", "eight columns of a tile"],
)
@pytest.mark.every(4)
def test_kernels_compile_without_spills(block: Ffn | Layer) -> None:
    assert [r.spills for r in cuda.compile_only(tile_block(block.program(), H200))] == [0]


@pytest.mark.nvrtc
def test_kernels_of_weights_by_columns_compile_without_spills() -> None:
    up, gated = lying(Layer(768, (3072,), bias=True, act="gelu").program(), ["w0"]), ["w0", "up0"]
    made = [
        tile_block(up, H200),
        share_tile(up, Split(1, 12, Tail.NONE)),
        tile_block(lying(GATE_UP.program(), gated), H200),
    ]
    assert [r.spills for p in made for r in cuda.compile_only(p)] == [0, 0, 0]


@pytest.mark.nvrtc
@pytest.mark.skipif(sass.disassembler() is None, reason="cuobjdump is not installed")
def test_products_are_on_the_tensor_cores_and_nothing_is_in_local_memory() -> None:
    (report,) = cuda.compile_only(tile_block(VIT.program(), H200))
    code = sass.disassemble(report.cubin)
    (source,) = cuda.sources(tile_block(VIT.program(), H200))
    own = (sass.products_on_tensor_cores, sass.registers_by_role, sass.no_local_memory, sass.no_generic_addresses)
    assert [found for rule in (*own, sass.loops_keep_their_operands) for found in rule(code, source)] == []


def golden_text() -> str:
    """What ``golden/tiled_block.cu`` holds: a gated block with a norm, biases and a residual. To write it again, here:
    ``PYTHONPATH=../lib python -c "import test_tiled_block as t; t.TEXT.write_text(t.golden_text())"``.
    """
    (source,) = cuda.sources(tile_block(replace(GATED, out=264, norm="layer").program(), H200))
    return source.text


def test_the_generated_kernel_is_the_golden_one() -> None:
    assert golden_text() == TEXT.read_text(), "it changed; if that is meant, write it again: see golden_text"
