"""Bf16 parts of float32 weights: the kernel on the host, a fiber a lane, and compiled."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from host_runs import gxx, is_caught
from torch import Tensor

from tilestream.cuda.compile import compile_text
from tilestream.cuda.host.build import HostRun
from tilestream.cuda.host.lanes import on_lanes
from tilestream.cuda.weight_parts import NAME, WARPS, call, kernel
from tilestream.ir.float32 import PAIRS
from tilestream.run.call import weight_parts


def weights() -> list[Tensor]:
    """Rows of more and of fewer than a warp's lanes, a transposed one, and numbers of every kind."""
    torch.manual_seed(0)
    odd = torch.tensor([[0.0, -0.0, float("inf"), float("-inf"), float("nan"), 3.4e38, -3.4e38, 1e-45, 1e-30, 1 / 3]])
    return [torch.randn(9, 70), torch.randn(33, 5).t(), odd]


def alike(got: Tensor, want: Tensor) -> bool:
    return torch.equal(got.view(torch.int16)[~got.isnan()], want.view(torch.int16)[~want.isnan()]) and torch.equal(
        got.isnan(), want.isnan()
    )


def test_parts_are_all_of_a_number():
    """Their sum is it, to the last bit; three of the nine products are left out."""
    weight = torch.randn(64, 64) * torch.logspace(-20, 20, 64)
    parts = weight_parts([weight])[0].double().split(64, 1)
    by_part = {part: parts[k] for k, (_, part) in enumerate(PAIRS)}
    assert torch.equal(sum(by_part.values()), weight.double())
    assert {*PAIRS} == {(x, w) for x in range(3) for w in range(3) if x + w < 3}


def test_small_products_are_added_first():
    assert [x + w for x, w in PAIRS] == sorted((x + w for x, w in PAIRS), reverse=True)


@gxx
def test_values():
    for got, want in zip(on_lanes(partial(call, weights())), weight_parts(weights()), strict=True):
        assert alike(got, want)


@gxx
def test_lanes_do_not_race():
    (got,) = on_lanes(partial(call, weights()[:1]), options=HostRun(sanitize=True))
    assert alike(got, weight_parts(weights()[:1])[0])


MUTANTS = {
    "large numbers round to infinity": ("last ? x : min_nan(max_nan(x, -LARGEST), LARGEST)", "x"),
    "the second weight is the first again": ("row -= p.weights[m].rows", "row -= 0"),
    "a row's last columns are left out": ("c += LANES", "c += 2 * LANES"),
    "strides are swapped": ("row * mine.row_stride + c * mine", "c * mine.row_stride + row * mine"),
    "nothing is taken off": ("x -= bf16::low(bits)", "x -= 0.0f"),
}


@gxx
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.every(2)
def test_mutants_are_caught(name: str):
    def right(options: HostRun) -> bool:
        return all(map(alike, on_lanes(partial(call, weights()), options=options), weight_parts(weights())))

    assert is_caught(right, "weight_parts.cuh", *MUTANTS[name])


@pytest.mark.nvrtc
def test_compiles_without_spills_for_six_ctas_an_sm():
    made = compile_text(kernel(3).text, NAME, 0)
    assert made.spills == 0 and made.stack == 0
    assert made.registers * 32 * WARPS * 6 <= 65536
