"""Hidden layers made and consumed by chunks of their columns: which are, what the schedule makes of it, kernels."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import sass
import torch
from host_runs import check
from programs import Program, chain
from random_pipelines import tensors_for
from torch import nn

from tilestream import reference
from tilestream.cuda import compile_only
from tilestream.devices import get
from tilestream.errors import VerifyError
from tilestream.graph import selection
from tilestream.graph.capture import capture
from tilestream.ir.axes import Loop
from tilestream.ir.columns import hidden_layers
from tilestream.ir.pipeline import Pipeline, Shard
from tilestream.ir.plain import plain
from tilestream.ir.serialise import pipeline_from_json, pipeline_to_json
from tilestream.ir.text import show
from tilestream.ir.verify import verify
from tilestream.kernels.families import why_no_kernel
from tilestream.kernels.fits import verify_on
from tilestream.kernels.shape import KernelShape, kernel_shape
from tilestream.kernels.stream.build import build
from tilestream.kernels.stream.emit import emit
from tilestream.kernels.stream.model import Place
from tilestream.options import Options
from tilestream.plan.passes.forms import chunk_hidden
from tilestream.plan.planner import plan

H200 = get("h200")
needs_host = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
needs_disassembler = pytest.mark.skipif(sass.disassembler() is None, reason="cuobjdump is not installed")


def blocks(
    count: int, width: int, hidden: int, act: str = "gelu", gated: bool = False, dtype: str = "bf16"
) -> Pipeline:
    """x + W2 act(W1 norm(x)), or with a second W1 that the first one gates."""
    p = Program(f"blocks{count}x{width}", dtype)
    x = p.load("x", width)
    for _ in range(count):
        y = p.layer_norm(x)
        h = p.linear(y, hidden, act)
        if gated:
            h = p.op("mul", hidden, h, p.linear(y, hidden))
        x = p.op("add", width, x, p.linear(h, width))
    p.store(x)
    return p.build()


def chunked(p: Pipeline, chunk: int = 64, replicas: int = 2) -> Pipeline:
    return chunk_hidden(p.with_stages((p.stages[0].with_(replicas=replicas),)), over=100, chunk=chunk)


@pytest.mark.parametrize("gated", [False, True])
def test_every_hidden_layer_is_found_with_its_reader(gated: bool):
    layers = hidden_layers(blocks(3, 96, 300, gated=gated).stages[0])
    assert [layer.features for layer in layers] == [300, 300, 300]
    assert all(len(layer.linears) == 1 + gated and layer.reader.kind == "linear" for layer in layers)


def test_a_layer_that_others_use_is_no_hidden_one():
    p = Program("shared")
    h = p.linear(p.load("x", 64), 300, "relu")
    p.store(p.linear(h, 64))
    p.store(p.linear(h, 32))
    normed = Program("normed")
    normed.store(normed.linear(normed.layer_norm(normed.linear(normed.load("x", 64), 300)), 64))
    assert hidden_layers(p.build().stages[0]) == hidden_layers(normed.build().stages[0]) == ()
    assert hidden_layers(chain(2, 300).stages[0], handed_on=["relu2"]) == ()


def test_a_layer_is_not_chunked_where_its_reader_is():
    """h2 is made from h1, which must be whole for it: of three layers in a row the first and the third are hidden."""
    p = Program("row")
    h = p.load("x", 64)
    for width in (300, 300, 300, 64):
        h = p.linear(h, width, "relu")
    p.store(h)
    assert [layer.axis for layer in hidden_layers(p.build().stages[0])] == ["linear1.c", "linear5.c"]


@pytest.mark.parametrize("gated", [False, True])
def test_the_loop_is_a_chunked_contraction(gated: bool):
    program = blocks(2, 96, 300, "silu", gated)
    p = chunked(program)
    verify(p)
    assert [kernel_shape(s) for s in plain(p).stages] == [KernelShape.CHUNKED_CONTRACTION]
    assert kernel_shape(plain(program).stages[0]) is KernelShape.ROW_STREAM
    assert why_no_kernel(p) == "" and "linear2.c by 64" in show(p)
    assert pipeline_from_json(pipeline_to_json(p)) == p


def test_chunks_change_nothing_of_the_meaning():
    program = blocks(2, 96, 300)
    tensors = tensors_for(program, 100, 0)
    whole, parts = (reference.run(p, tensors) for p in (program, chunked(program)))
    assert all(torch.equal(whole[n], parts[n]) for n in whole)


def test_loops_are_over_hidden_layers_alone():
    p = chunked(blocks(1, 96, 300))
    stage = p.stages[0]
    with pytest.raises(VerifyError, match="no hidden layer"):
        verify(p.with_stages((replace(stage, loops=(*stage.loops, Loop("layer_norm1.c", 64))),)))
    for wrong in (stage.with_(placement=Shard(1)), replace(stage, loops=(stage.loops[0], Loop("linear2.c", 40)))):
        with pytest.raises(VerifyError, match="Shard|40 columns"):
            verify_on(p.with_stages((wrong,)), H200)
    with pytest.raises(VerifyError, match="fp32"):
        verify_on(chunked(blocks(1, 96, 300, dtype="f32")), H200)


def test_the_chunk_stays_in_registers_and_the_residual_has_one_buffer():
    p = chunked(blocks(4, 192, 384))
    schedule = build(p.stages[0], p)
    assert [(loop.turns, loop.chunk) for loop in schedule.loops] == [(6, 64)] * 4
    assert all(schedule.places[f"gelu{n}"] is Place.REGISTERS for n in (3, 8, 13, 18))
    assert all(schedule.places[f"layer_norm{n}"] is Place.REGISTERS for n in (1, 6, 11, 16))
    assert schedule.buffer_features == (192,)  # overwritten as it is read, block after block


def test_operands_of_as_many_registers_as_a_chunk_wait_in_shared_memory():
    places = {w: build(p.stages[0], p).places["layer_norm1"] for w in (64, 128) for p in [chunked(blocks(1, w, 512))]}
    assert places == {64: Place.SHARED, 128: Place.REGISTERS}


@needs_host
@pytest.mark.parametrize(
    "program, chunk",
    [
        (blocks(2, 64, 192), 64),
        (blocks(2, 192, 384), 64),
        (blocks(1, 96, 200, "silu", gated=True), 64),
        (blocks(1, 72, 130, "sigmoid"), 64),  # the last chunk is filled up, where a sigmoid of zero is none
        (blocks(1, 256, 520, "relu"), 64),
        (blocks(1, 128, 300), 128),
        (blocks(1, 64, 192, dtype="f16"), 64),
    ],
    ids=["two", "wide", "gated", "ragged", "widest", "chunks of 128", "f16"],
)
@pytest.mark.parametrize("in_flight", [2, 1])
@pytest.mark.every(3)
def test_kernels_on_the_host(program: Pipeline, chunk: int, in_flight: int, folder: Path):
    p = chunked(program, chunk)
    check(p.with_stages((p.stages[0].with_(in_flight=in_flight),)), 300, folder)


@needs_disassembler
def test_the_machine_code_of_a_chunked_kernel():
    p = chunked(blocks(1, 192, 384), replicas=132)
    (report,) = compile_only(p)
    assert report.spills == 0 and sass.lint(report.cubin, emit(p)) == []


def test_the_lint_finds_an_operand_that_a_turn_overwrites():
    source = emit(chunked(blocks(1, 96, 300)))
    lines = ("NOP", "HGMMA.64x64x16.F32.BF16 R24, R88, gdesc[UR16], R24", "FMUL R88, R1, R2", "BRA 0x0")
    code = sass.parse("\n".join(f"/*{16 * k:04x}*/  {line} ;" for k, line in enumerate(lines)))
    assert sass.loops_keep_their_operands(code, source)
    packed = sass.parse("\n".join(f"/*{16 * k:04x}*/  {lines[n]} ;" for k, n in enumerate((2, 1, 0, 3))))
    assert not sass.loops_keep_their_operands(packed, source)


class Block(nn.Module):
    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm, self.one, self.two = nn.LayerNorm(width), nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.two(nn.functional.gelu(self.one(self.norm(x))))


def regions(module: nn.Module, features: int) -> tuple[selection.Partition, ...]:
    torch.compiler.reset()
    module = module.bfloat16().eval().requires_grad_(False)
    found = capture(module, (torch.randn(16, 64, features).bfloat16(),)).graphs
    return tuple(selection.partition(graph) for graph in found)


def test_wide_hidden_layers_are_selected_and_wide_sums_are_not():
    (inside,) = regions(nn.Sequential(Block(256, 1024), Block(256, 1024)), 256)
    assert len(inside.regions) == 1 and not inside.exclusions
    (pair,) = regions(nn.Sequential(nn.Linear(60, 1024), nn.ReLU(), nn.Linear(1024, 1024)), 60)  # 120 bytes a row
    assert not pair.regions and any("1024 features wide" in e.reason for e in pair.exclusions)


def test_the_planner_takes_wide_blocks_by_chunks():
    made = plan(blocks(4, 192, 384), 114_723, H200, Options())
    assert made.chosen.detail == "hidden layers by chunks" and made.chosen.predicted_us is not None
    # Measured on an H200: 421 us.
    assert made.chosen.predicted_us == pytest.approx(421, rel=0.2)
    alone = plan(blocks(1, 256, 1024), 65_536, H200, Options())
    assert alone.chosen.detail == "hidden layers by chunks"


def test_a_compiled_block_runs_by_chunks_on_the_reference_machine():
    module = Block(64, 600).bfloat16().eval().requires_grad_(False)
    x = torch.randn(600, 64).bfloat16()  # of fewer, SMs would share a tile
    torch.compiler.reset()
    with torch.no_grad():
        got = torch.compile(module, backend="tilestream", options={"target": "reference", "strategy": "vertical"})(x)
        want = module.double()(x.double())
    assert float((got.double() - want).norm() / want.norm()) < 2**-7
