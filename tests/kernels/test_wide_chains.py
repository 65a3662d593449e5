"""Backward chains up to 128 wide: values of their kernels on the host, their protocol, their machine code."""

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
from tilestream.errors import VerifyError
from tilestream.ir.axes import along
from tilestream.ir.pipeline import Pipeline, Role, Tensor, TileOp
from tilestream.kernels.fits import verify_on
from tilestream.kernels.gradients import builds, find_chain
from tilestream.kernels.gradients.cost import cost
from tilestream.kernels.gradients.layouts import Kind

on_host = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
needs_disassembler = pytest.mark.skipif(
    sass.disassembler() is None, reason="cuobjdump is not installed (pip install nvidia-cuda-cuobjdump)"
)
SMALL = chain(24, 40, 128, 16, bias=True)
WITHOUT_DX = chain(24, 40, 128, 16, bias=True, dx=False)


@on_host
@pytest.mark.smoke
@pytest.mark.parametrize("rows", [1, 64, 300])
def test_three_layers_over_two_ctas(rows: int, folder: Path) -> None:
    """Ragged widths and rows; at one row the second warpgroup's tile is empty, and the second CTA has none."""
    check(SMALL, rows, folder)


@on_host
@pytest.mark.parametrize(
    "p",
    [
        chain(*widths(2, 128)),
        chain(128, 128, 128, ctas=3, bias=True, dtype="bf16", weight="f32"),
        chain(40, 128, 104, 72, bias=True, dx=False),
        chain(64, 64, 128, 8, ctas=1, bias=True, slope=""),
        chain(72, 128, ctas=2, dx=True),
        chain(64, 128, 8, slope="made", bias=True),
        chain(64, 104, 72, slope="made", bias=True, dx=False),
        chain(128, 72, bias=True, residual=True),
        chain(63, 128, 3, bias=True, dx=False),
    ],
    ids=[
        "tiny-cuda-nn's",
        "bf16, biases",
        "ragged, no dX",
        "a layer of 64, no activation, one CTA",
        "one layer",
        "GELU made again",
        "the same, no dX",
        "a residual",
        "odd rows",
    ],
)
@pytest.mark.every(3)
def test_any_widths(p: Pipeline, folder: Path) -> None:
    assert builds(p)[0].layout.kind is Kind.WIDE
    check(p, 450, folder)


@on_host
def test_the_same_input_gives_the_same_bits_and_it_means_what_the_reference_machine_computes(folder: Path) -> None:
    inputs = data(SMALL, 300)
    first, meant = run(SMALL, inputs, folder), reference.run(SMALL, inputs)
    for other in (run(SMALL, inputs, folder, seed=1), run(SMALL, inputs, folder, launches=3)):
        assert all(torch.equal(first[name], other[name]) for name in first)
    for name in first:
        torch.testing.assert_close(first[name].double(), meant[name].double(), rtol=2**-9, atol=1e-2)


MUTANTS = {
    "a gradient is overwritten while the other warpgroup's sums read it": (
        "      mma_wait<1>();\n      in.release();\n      named_sync(BOTH_GROUPS, 256);\n",
        "      mma_wait<1>();\n      in.release();\n",
    ),
    "a gradient is read before the other warpgroup has written it": (
        "      fence_async_shared();\n      named_sync(BOTH_GROUPS, 256);\n      dy0 = smem + 196608;",
        "      fence_async_shared();\n      dy0 = smem + 196608;",
    ),
    "dX is overwritten while it is copied out": ("      if (group_leader()) store_wait_read<0>();\n", ""),
}


@on_host
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_caught(name: str, folder: Path) -> None:
    """Each step of the protocol is there for a reason: without it a value is wrong, or ThreadSanitizer sees why.

    Products read as late as they may here. Where no dX is wanted they are waited for at once, so that a barrier in
    front of them is missed.
    """
    p = WITHOUT_DX if "before" in name else SMALL
    with pytest.raises((*CAUGHT, AssertionError)):
        check(p, 128 * 10, folder, mutations=(Mutation("kernel", *MUTANTS[name]),), sanitize=True)


@on_host
def test_no_races(folder: Path) -> None:
    check(SMALL, 128 * 6, folder, sanitize=True, launches=2)


def test_both_warpgroups_share_the_sums() -> None:
    """Two layers of 128 and one of 16 outputs: 64 x 128 of each dW, and 64 x 16 turned, in a thread's registers."""
    p = chain(*widths(2, 128), ctas=132)
    verify_on(p, get("h200"))
    (s,) = builds(p)
    assert s.layout.kind is Kind.WIDE and s.layout.registers == 2 * 64 + 8 + 72 and s.slots == 5
    assert [(h.blocks, h.turned, h.groups, h.chunk) for h in s.layout.held] == [
        (2, True, 2, 0), *[(8, False, 2, 0), (8, False, 2, 1)] * 2
    ]  # fmt: skip
    assert s.fours * 16 == 4 * (128 * 16 + 2 * 128 * 128)


@pytest.mark.parametrize(
    ("p", "why"),
    [
        (chain(*[128] * 4), r"sums of 32 \+ 32 \+ 32 \+ 32 \+ 32 \+ 32 \+ 72 registers a thread = 264 > 232"),
        (chain(*[128] * 3, slope="gelu"), r"bytes of weights and gradients leave 6 < 8 slots of 16384 bytes"),
    ],
    ids=["too deep", "too much to read"],
)
def test_what_does_not_fit_is_told_the_numbers(p: Pipeline, why: str) -> None:
    with pytest.raises(VerifyError, match=why):
        builds(p)


def test_the_prediction_counts_every_byte_once() -> None:
    """Of two layers of 128 dY and two inputs are read, dX is written; nothing between the layers is."""
    h200, rows = get("h200"), 262_144
    predicted = cost(chain(128, 128, 128, ctas=132), rows, h200)
    assert predicted["dram"].seconds == pytest.approx(rows * 2 * 4 * 128 / h200.dram_bytes_per_s)
    assert max(predicted["tensor"].seconds, predicted["dram"].seconds) <= predicted.seconds


CODE = {
    "two hidden layers": chain(*widths(2, 128), ctas=132),
    "biases": chain(*widths(2, 128), ctas=132, bias=True, dtype="bf16", weight="f32"),
}


@pytest.mark.nvrtc
@needs_disassembler
@pytest.mark.parametrize("name", CODE)
def test_machine_code(name: str) -> None:
    checked_code(CODE[name])


def test_nothing_leaves_between_two_layers_of_a_launch() -> None:
    p = chain(128, 128, 128)
    (stage,) = p.stages
    between = next(op.out for op in stage.ops if op.kind == "relu_backward" and op.out is not None)
    named = [a.name for a in between.axes]
    store = TileOp("store", None, (along(between.name, named),), (along("LEFT", named),))
    tensors = (*p.tensors, Tensor("LEFT", Role.OUTPUT, between.axes, between.dtype))
    left = replace(p, tensors=tensors, stages=(replace(stage, ops=(*stage.ops, store)),))
    assert find_chain(left.stages[0], left).left == ((between.name, "LEFT"),)
    with pytest.raises(VerifyError, match="leaves between two layers"):
        builds(left)
