"""Backward chains: values of their kernels on the host, their protocol, their machine code, and what is none."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import sass
import torch
from backward_chains import chain, checked_code, data, widths
from host_chains import check, run
from host_runs import CAUGHT

from tilestream import reference
from tilestream.cuda.host.build import Mutation
from tilestream.devices import get
from tilestream.errors import QueueTimeout, VerifyError
from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.families import why_no_kernel
from tilestream.kernels.fits import verify_on
from tilestream.kernels.gradients import builds, is_chain
from tilestream.kernels.gradients.cost import cost
from tilestream.reference.whole import run_whole

on_host = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
needs_disassembler = pytest.mark.skipif(
    sass.disassembler() is None, reason="cuobjdump is not installed (pip install nvidia-cuda-cuobjdump)"
)


# -- values


@on_host
@pytest.mark.smoke
@pytest.mark.parametrize("rows", [1, 64, 300])
def test_two_layers_over_two_ctas(rows: int, folder: Path) -> None:
    """Ragged widths and rows; at one row three of the four warpgroups have none."""
    check(chain(24, 40, 16, bias=True), rows, folder)


@on_host
@pytest.mark.parametrize(
    "p",
    [
        chain(*widths(4), ctas=3, dtype="bf16"),
        chain(64, 64, 64, 64, 8, slope="gelu", dx=False, weight="f32"),
        chain(32, 64, 8, ctas=1, bias=True, slope="", weight="f32"),
        chain(16, 64, dx=True),
        chain(16, 64, dx=False, bias=True),
        chain(63, 64, 3, dx=False, bias=True, dtype="bf16", weight="f32"),
        chain(24, 40, 64, 64, 8, slope="made", bias=True),
    ],
    ids=[
        "tiny-cuda-nn's, four hidden layers",
        "GELU, no dX",
        "no activation, one CTA",
        "one layer",
        "one layer, no dX",
        "odd rows",
        "GELU made again",
    ],
)
@pytest.mark.every(3)
def test_any_widths_and_slopes(p: Pipeline, folder: Path) -> None:
    check(p, 450, folder)


@on_host
def test_the_same_input_gives_the_same_bits_and_workspaces_are_used_again(folder: Path) -> None:
    p = chain(24, 40, 16, ctas=3, bias=True)
    inputs = data(p, 1000)
    first = run(p, inputs, folder)
    for other in (run(p, inputs, folder, seed=1), run(p, inputs, folder, launches=3)):
        assert all(torch.equal(first[name], other[name]) for name in first)


@on_host
def test_it_means_what_the_reference_machine_computes(folder: Path) -> None:
    p = chain(24, 40, 16)
    inputs = data(p, 300)
    got, meant, whole = run(p, inputs, folder), reference.run(p, inputs), run_whole(p, inputs)
    for name in got:
        torch.testing.assert_close(got[name].double(), meant[name].double(), rtol=2**-9, atol=1e-2)
        torch.testing.assert_close(whole[name].double(), meant[name].double(), rtol=2**-9, atol=1e-2)


# -- protocol


@on_host
def test_waits_are_bounded_and_say_for_whom(folder: Path) -> None:
    p = chain(24, 40, 16)
    lost = Mutation(
        "gradients.cuh",
        "if (warp == 0 && lane_in_warp() == 0) flag_release(mine, launch);",
        "if (warp == 0 && cta != 1) flag_release(mine, launch);",
    )
    with pytest.raises(QueueTimeout, match="CTA [01] .* partial sums of CTA 1, one of 2 that share out the rows"):
        run(p, data(p, 100), folder, mutations=(lost,), flag_limit_s=1.0)


MUTANTS = {
    "a gradient is multiplied before all lanes have written it": (
        "      fence_async_shared();\n      named_sync(GROUP_BARRIER + g, 128);\n      dy0 =",
        "      dy0 =",
    ),
    "dX is overwritten while it is copied out": ("      if (group_leader()) store_wait_read<0>();\n", ""),
    "an input is summed before all lanes have made it": (
        "fence_async_shared();\n      named_sync(GROUP_BARRIER + g, 128);\n      mma_fence();\n      add_rows<T, 1>(s1",
        "mma_fence();\n      add_rows<T, 1>(s1",
    ),
    "sums are left before the other warpgroup has given its own": (
        "    named_sync(BOTH_GROUPS, 256);\n    if (g == 0) {\n      add_given",
        "    if (g == 0) {\n      add_given",
    ),
}


@on_host
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.every(2)
def test_mutants_are_caught(name: str, folder: Path) -> None:
    """Each step of the chain is there for a reason; what all kernels of gradients do is ``test_stationary``'s."""
    p = chain(24, 40, 16, slope="made", dx=False) if "input" in name else chain(24, 40, 16)
    with pytest.raises((*CAUGHT, AssertionError)):
        check(p, 64 * 40, folder, mutations=(Mutation("kernel", *MUTANTS[name]),), sanitize=True)


@on_host
def test_no_races(folder: Path) -> None:
    check(chain(24, 40, 16, bias=True), 64 * 12, folder, sanitize=True, launches=2)


# -- what is one, and what is not


def test_row_ops_and_sums_in_one_stage_are_a_backward_chain() -> None:
    p = chain(*widths(4), ctas=132)
    verify_on(p, get("h200"))
    assert is_chain(p) and why_no_kernel(p) == ""
    (s,) = builds(p)
    assert (s.ctas, s.slots, [h.blocks for h in s.layout.held]) == (132, 7, [2, 8, 8, 8, 8])
    assert s.shared_bytes <= 232448 and s.layout.registers == 4 * 34 + 88


@pytest.mark.parametrize(
    ("p", "why"),
    [
        (chain(*[64] * 6), r"sums of 32 \+ 32 \+ 32 \+ 32 \+ 32 \+ 88 registers a thread = 248 > 232"),
        (chain(64, 192, 64), r"192 columns; a backward chain takes up to 128, and weights of rows of a multiple of 16"),
        (chain(63, 64, 64), r"63 columns"),
    ],
    ids=["too deep", "too wide", "odd"],
)
def test_what_does_not_fit_is_told_the_numbers(p: Pipeline, why: str) -> None:
    with pytest.raises(VerifyError, match=why):
        builds(p)
    assert why_no_kernel(p)


def test_what_else_a_stage_does_is_refused() -> None:
    p = chain(64, 64, 64)
    (stage,) = p.stages
    ops = tuple(replace(op, kind="log", tiles=op.tiles[:1]) if op.kind == "relu_backward" else op for op in stage.ops)
    with pytest.raises(VerifyError, match="goes to log"):
        builds(p.with_stages((replace(stage, ops=ops),)))
    with pytest.raises(VerifyError, match="two warpgroups"):
        builds(p.with_stages((replace(stage, mesh=stage.mesh[:1]),)))


def test_the_prediction_counts_every_byte_once() -> None:
    """Inputs of three layers and dY are read, dX is written; nothing between the layers is."""
    h200, rows = get("h200"), 262_144
    predicted = cost(chain(*widths(2), ctas=132), rows, h200)
    assert predicted["dram"].seconds == pytest.approx(rows * 2 * (16 + 3 * 64 + 64) / h200.dram_bytes_per_s)
    assert max(predicted["tensor"].seconds, predicted["dram"].seconds) <= predicted.seconds


# -- machine code

CODE = {
    "two hidden layers": chain(*widths(2), ctas=132),
    "four hidden layers": chain(*widths(4), ctas=132),
    "biases": chain(*widths(3), ctas=132, bias=True, dtype="bf16", weight="f32"),
}


@pytest.mark.nvrtc
@needs_disassembler
@pytest.mark.parametrize("name", CODE)
def test_machine_code(name: str) -> None:
    code = checked_code(CODE[name])
    assert len(code.having("BAR.ARV")) == 2
