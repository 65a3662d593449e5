"""Several dtypes in one stage: every load, store, queue and waiting tile in its own, all products in one."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from host_runs import check
from mixed_programs import ONE_STAGE, residual_stream
from programs import Program
from random_pipelines import random_pipeline, tensors_for
from random_programs import Limits
from torch import nn

from tilestream import devices, reference
from tilestream.cuda.host.build import HostRun, run_on_host
from tilestream.errors import VerifyError
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.ir.traffic import traffic
from tilestream.kernels.fits import verify_on
from tilestream.kernels.stream.build import build
from tilestream.kernels.stream.emit import emit
from tilestream.kernels.stream.layout import lay_out
from tilestream.simulator.from_pipeline import launch_of

H200 = devices.get("h200")
FUZZ = 16
needs_gxx = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")


@needs_gxx
@pytest.mark.parametrize("rows", [1, 200])
@pytest.mark.parametrize("name", ONE_STAGE)
@pytest.mark.every(4)
def test_kernels_mean_what_the_reference_machine_means(name: str, rows: int, folder: Path) -> None:
    pipeline = ONE_STAGE[name]()
    verify_on(pipeline, H200)
    check(pipeline, rows, folder)


@needs_gxx
@pytest.mark.parametrize("seed", range(FUZZ))
@pytest.mark.every(4)
def test_random_pipelines(seed: int, folder: Path) -> None:
    pipeline = random_pipeline(seed, Limits(max_width=512 if seed % 3 == 0 else 256, mixed=True))
    try:
        verify_on(pipeline, H200)
    except VerifyError as e:
        pytest.skip(f"does not fit: {e}")
    check(pipeline, 130, folder, seed)


def _without_weights(pipeline: Pipeline, rows: int) -> dict[str, torch.Tensor]:
    tensors = tensors_for(pipeline, rows)
    return {n: torch.zeros_like(t) if pipeline.tensor(n).role is Role.PARAMETER else t for n, t in tensors.items()}


@needs_gxx
@pytest.mark.parametrize("name", ["residual", "residual_by_columns"])
def test_a_stream_in_fp32_keeps_its_bits(name: str, folder: Path) -> None:
    """With weights of zero nothing is added, and nothing may be rounded on the way."""
    pipeline = ONE_STAGE[name]()
    tensors = _without_weights(pipeline, 100)
    (out,) = run_on_host(pipeline, tensors, HostRun(folder=folder)).values()
    assert torch.equal(out, tensors["s"])
    (out,) = reference.run(pipeline, tensors).values()
    assert torch.equal(out, tensors["s"])


def test_waiting_tiles_take_the_bytes_of_their_dtype() -> None:
    """The stream waits in fp32 for both products of its layer; the operand of a product waits in registers."""
    p = residual_stream(2, 128)
    schedule = build(p.stages[0], p)
    assert schedule.dtype == "bf16"
    assert schedule.buffer_dtypes == ("f32",) and schedule.buffer_features == (128,)
    assert set(schedule.slot_features) == {128}
    assert lay_out(schedule).buffer_bytes == (64 * 128 * 4,)


def test_boxes_are_32_columns_of_fp32_and_64_of_bf16() -> None:
    source = emit(ONE_STAGE["residual"]())
    maps = source.tables.maps
    assert {m.name: m.dtype for m in maps if m.kind in ("input", "output")} == {"s": "f32", "y5": "f32"}
    assert {m.dtype for m in maps if m.kind == "weight"} == {"bf16"}
    columns = {op[1] for op in source.tables.load_ops if maps[op[0]].name == "s"}
    assert columns == {0, 32, 64, 96}
    assert {op[1] for op in source.tables.store_ops} == {0, 32, 64, 96}
    assert {op[1] for op in source.tables.page_ops} == {0, 64}


def test_bytes_are_those_of_each_dtype() -> None:
    rows, width, layers = 640, 64, 2
    p = residual_stream(layers, width)
    moved = traffic(p, rows)
    weights = layers * (width * width + width) * 2
    assert (moved.dram_read, moved.dram_written) == (rows * width * 4 + weights, rows * width * 4)
    work = launch_of(p, rows, H200).stages[0].work
    assert work.dtype == "bf16"
    assert work.dram_read == work.dram_write == p.stages[0].tiles_per_step * 64 * width * 4


def test_products_of_two_dtypes_are_refused() -> None:
    p = Program("two")
    x = p.load("x", 64)
    h = p.op("cast", 64, p.linear(x, 64), dtype="f32")
    p.dtype = "f32"
    p.store(p.linear(h, 64))
    says = r"has products of several dtypes \(bf16 at model.py:1; f32 at model.py:3\)"
    with pytest.raises(VerifyError, match=says) as e:
        verify_on(p.build(), H200)
    assert "cast their tiles and weights to one dtype, or put them in different stages" in e.value.remedy


class Stream(nn.Module):
    """Mamba's residual_in_fp32."""

    def __init__(self, width: int = 64, layers: int = 2) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.RMSNorm(width) for _ in range(layers))
        self.layers = nn.ModuleList(nn.Linear(width, width, dtype=torch.bfloat16) for _ in range(layers))

    def forward(self, s: torch.Tensor) -> torch.Tensor:
        for norm, layer in zip(self.norms, self.layers, strict=True):
            s = s + layer(norm(s).to(torch.bfloat16))
        return s


@pytest.mark.smoke
def test_a_model_with_a_residual_stream_in_fp32_is_one_region() -> None:
    torch._dynamo.reset()
    model, s = Stream().eval().requires_grad_(False), torch.randn(100, 64)
    compiled = torch.compile(model, backend="tilestream", options={"target": "reference", "fallback": False})
    got, want = compiled(s), model(s)
    assert got.dtype == want.dtype == torch.float32
    torch.testing.assert_close(got, want, rtol=0, atol=2e-2)
