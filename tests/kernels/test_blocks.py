"""Wide layers in place: tiles made by blocks of columns, parked and packed again; maxima over rows."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import sass
import torch
from host_runs import check
from programs import chain, edge_block
from random_pipelines import tensors_for
from torch import nn
from wide_programs import Points, held, mlp, points, residual

from tilestream import reference
from tilestream.cuda import compile_only
from tilestream.devices import get
from tilestream.errors import VerifyError
from tilestream.graph import selection
from tilestream.graph.capture import capture
from tilestream.graph.rewrites.maxima import is_of_groups, join_maxima
from tilestream.graph.rewrites.table import rewrite
from tilestream.ir.axes import Loop
from tilestream.ir.pipeline import Pipeline, Shard
from tilestream.ir.serialise import pipeline_from_json, pipeline_to_json
from tilestream.ir.text import show
from tilestream.ir.verify import verify
from tilestream.kernels.fits import verify_on
from tilestream.kernels.stream.build import build
from tilestream.kernels.stream.emit import emit
from tilestream.kernels.stream.layout import lay_out
from tilestream.kernels.stream.model import Place
from tilestream.options import Options
from tilestream.plan.planner import plan

H200 = get("h200")
needs_host = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
needs_disassembler = pytest.mark.skipif(sass.disassembler() is None, reason="cuobjdump is not installed")


def blocks_of(p: Pipeline) -> list[int]:
    return [loop.tile for loop in p.stages[0].loops if loop.held]


def test_blocks_are_what_registers_allow_beside_the_operand():
    assert blocks_of(held(mlp(416, 400, 400, 1))) == [136, 136]
    assert blocks_of(held(mlp(448, 448, 448, 1))) == [112, 112]
    assert blocks_of(held(mlp(512, 512, 512))) == [88, 64]  # the last one, which is stored, in whole chunks
    assert blocks_of(held(mlp(1536, 512, 512))) == [256, 64]  # an operand of 1536 columns streams
    assert blocks_of(held(mlp(64, 256, 64))) == []
    for program in (mlp(416, 400, 400, 1), mlp(512, 512, 512), mlp(128, 1024), edge_block(264, 2), residual(264)):
        verify_on(held(program), H200)


def test_what_it_says_of_itself_comes_back():
    p = held(mlp(416, 400, 400, 1))
    verify(p)
    assert "linear1.c by 136 held" in show(p)
    assert pipeline_from_json(pipeline_to_json(p)) == p


def test_blocks_change_nothing_of_the_meaning():
    program = mlp(64, 300, 300, 40)
    tensors = tensors_for(program, 100, 0)
    whole, parts = (reference.run(p, tensors) for p in (program, held(program)))
    assert all(torch.equal(whole[n], parts[n]) for n in whole)


def test_the_last_block_goes_where_the_next_product_reads():
    """416-400-400-1: the operand in registers, of each result two blocks of three parked, one operand after another."""
    p = held(mlp(416, 400, 400, 1))
    schedule = build(p.stages[0], p)
    assert schedule.places["load0.packed"] is schedule.places["relu2.packed"] is Place.REGISTERS
    assert schedule.parked == {"relu2@0": 0, "relu2@136": 136, "relu4@0": 0, "relu4@136": 136}
    assert schedule.parked_features == 272 and schedule.registers == 208
    assert [(s.gemm.first, s.gemm.features) for s in schedule.steps if s.gemm] == [
        (0, 136), (136, 136), (272, 128), (0, 136), (136, 136), (272, 128), (0, 1),
    ]  # fmt: skip
    layout = lay_out(schedule)
    assert layout.parking_bytes == 272 * 128 and layout.pages == 7 and layout.in_slots == 2


def test_what_holds_no_columns_is_told_so():
    p = held(mlp(64, 300, 40))
    stage = p.stages[0]
    with pytest.raises(VerifyError, match="no columns that a linear"):
        verify(p.with_stages((replace(stage, loops=(*stage.loops, Loop("relu2.c", 64, held=True))),)))
    for wrong in (stage.with_(placement=Shard(1)), replace(stage, loops=(stage.loops[0], Loop("linear1.c", 44, True)))):
        with pytest.raises(VerifyError, match=r"Shard\(1\)|44 columns"):
            verify_on(p.with_stages((wrong,)), H200)
    with pytest.raises(VerifyError, match="products of f32"):
        verify_on(held(mlp(64, 300, 40, dtype="f32")), H200)
    crowded = mlp(512, 512, 64).stages[0]
    with pytest.raises(VerifyError, match="292 > 232 registers"):  # 128 of the operand, 128 accumulators, 36
        verify_on(
            mlp(512, 512, 64).with_stages((replace(crowded, loops=(crowded.loops[0], Loop("linear1.c", 256, True))),)),
            H200,
        )


@needs_host
@pytest.mark.parametrize(
    "program, over, widest",
    [
        (mlp(48, 40, 40, 24), 30, 16),
        (mlp(416, 400, 400, 1), 256, 256),
        (mlp(63, 270, 301, act="gelu"), 256, 256),  # odd rows, a last block that is filled up
        (mlp(600, 320, 320), 256, 256),  # an operand that streams for every block
        (residual(264), 256, 256),
        (mlp(64, 300, 72, dtype="f16"), 256, 256),
        (edge_block(40, 2, "silu"), 30, 16),  # LayerNorm over blocks, and a residual that streams by blocks
        (points(24, 128, act="relu"), 100, 64),
        (points(3, 32, 640), 256, 256),
    ],
    ids=["small", "mlp", "odd", "streamed", "residual", "f16", "norm", "maxima", "points"],
)
@pytest.mark.every(3)
def test_kernels_on_the_host(program: Pipeline, over: int, widest: int, folder: Path):
    check(held(program, over=over, widest=widest), 144, folder)


@needs_disassembler
def test_the_machine_code_of_a_kernel_in_place():
    p = held(mlp(272, 264), replicas=132)
    (report,) = compile_only(p)
    assert report.spills == 0 and sass.lint(report.cubin, emit(p)) == []


def test_equal_layers_are_a_loop():
    two, four = (emit(held(mlp(320, *[320] * n, 8))).text.count("start_from<") for n in (3, 5))
    assert two == four


def test_the_planner_takes_wide_chains_in_place():
    made = plan(mlp(416, 400, 400, 400, 1), 131_072, H200, Options())
    assert made.chosen.detail.startswith("wide layers in place")
    assert plan(chain(4, 256), 65_536, H200, Options()).chosen.pipeline.stages[0].loops[1:] == ()


# -- maxima over rows


def partition_of(module: nn.Module, *shape: int) -> selection.Partition:
    torch.compiler.reset()
    (graph,) = capture(module.bfloat16().eval().requires_grad_(False), (torch.randn(shape).bfloat16(),)).graphs
    return selection.partition(graph)


def test_a_wide_layer_of_which_maxima_leave_is_selected():
    found = partition_of(Points(1024), 8, 128, 3)
    assert [op.kind for op in found.regions[0].program.stages[0].ops][-2:] == ["max_rows", "store"]
    assert any("rows" in e.reason for e in found.exclusions)  # the maximum of what every 16 points have left
    odd = partition_of(Points(1024), 8, 120, 3)  # no multiple of 16 points
    assert not any(op.kind == "max_rows" for r in odd.regions for op in r.program.stages[0].ops)


def test_layers_in_front_of_maxima_are_one_region():
    """Two of them would be a feed-forward block, whose 1024 columns leave: 268 MB for 131,072 points."""
    relu = nn.ReLU()
    layers = nn.Sequential(nn.Linear(3, 64), relu, nn.Linear(64, 128), relu, nn.Linear(128, 1024))

    class Cloud(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = layers

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layers(x).amax(1)

    (region,) = partition_of(Cloud(), 8, 128, 3).regions
    kinds = [op.kind for op in region.program.stages[0].ops]
    assert kinds.count("linear") == 3 and kinds[-2:] == ["max_rows", "store"]


def test_a_maximum_that_no_region_takes_stays_whole():
    """The graph that goes to Inductor is the one that the user wrote."""
    torch.compiler.reset()
    (graph,) = capture(
        Points(1024).bfloat16().eval().requires_grad_(False), (torch.randn(8, 128, 3).bfloat16(),)
    ).graphs
    nodes = [n for n in graph.graph.nodes if is_of_groups(n)]
    assert len(nodes) == 1
    rewrite(graph, join_maxima)
    assert not any(is_of_groups(n) for n in graph.graph.nodes)
    graph.graph.lint()


@pytest.mark.parametrize("width", [128, 640])
def test_compiled_points_on_the_reference_machine(width: int):
    module = Points(width).bfloat16().eval().requires_grad_(False)
    x = torch.randn(40, 32, 3).bfloat16()
    torch.compiler.reset()
    with torch.no_grad():
        got = torch.compile(module, backend="tilestream", options={"target": "reference"})(x)
        want = module.double()(x.double())
    assert float((got.double() - want).norm() / want.norm()) < 2**-7


def test_the_planner_takes_points_in_place():
    made = plan(points(3, 64, 64, 64, 128, 1024), 131_072, H200, Options())
    assert made.chosen.detail.startswith("wide layers in place")
