"""Gradients of norms: the kernel on the host, a fiber a lane, and compiled; what the operator means."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from host_runs import gxx, is_caught
from norms import CASES, given, is_right
from torch import Tensor
from torch.nn import functional as F

from tilestream.cuda.compile import compile_text
from tilestream.cuda.host.build import HostRun
from tilestream.cuda.host.lanes import on_lanes
from tilestream.cuda.norm_gradients import call
from tilestream.graph.rewrites.norm_sums import norm_gradients
from tilestream.kernels.operators.norm_gradients import NAME, NormGradients, kernel


def on_host(operands: list[Any], options: HostRun | None = None) -> list[Tensor]:
    return on_lanes(lambda address: call(*operands, address), options=options)


@gxx
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(3)
def test_values(name: str) -> None:
    operands = given(CASES[name])
    assert is_right(on_host(operands), operands)


@gxx
def test_lanes_do_not_race() -> None:
    operands = given(CASES["three vectors"])
    assert is_right(on_host(operands, HostRun(sanitize=True)), operands)


@gxx
def test_any_order_of_lanes_gives_the_same_bits() -> None:
    operands = given(CASES["three vectors"])
    first, *others = (on_host(operands, HostRun(seed=seed)) for seed in range(3))
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))


MUTANTS = {
    "sums are read too early": ("  lanes::all_together();\n  for (int at", "  for (int at", True),
    "one warp's sums alone": ("w < WARPS; ++w) sum", "w < 1; ++w) sum", False),
    "means are not subtracted": ("element(o.x, k, e) - mean[0]", "element(o.x, k, e)", False),
    "every other lane's part of a row": ("far > 0", "far > 1", False),
    "no rows beside": ("if (BESIDE) made[n] +=", "if (false) made[n] +=", False),
    "the next row is this one": ("    now = next;\n", "", False),
    "all warps have one row": ("lanes::block() * WARPS + lanes::warp();", "lanes::block() * WARPS;", False),
    "sums of the bias are not weighted": ("c.of_bias[k][e] += g", "c.of_bias[k][e] += normal", False),
}  # fmt: skip


@gxx
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.every(3)
def test_mutants_are_caught(name: str) -> None:
    operands = given(CASES["three vectors"])
    operands[-1] = 1
    source = "norm_gradients.cuh"
    assert is_caught(lambda options: is_right(on_host(operands, options), operands), source, *MUTANTS[name])


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("weighted", [True, False])
def test_what_it_means(centred: bool, weighted: bool) -> None:
    x, weight, bias, gradient, beside = (
        torch.randn(s, dtype=torch.float64) for s in ((5, 7, 12), 12, 12, (5, 7, 12), (5, 7, 12))
    )
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    w, b = (weight, bias) if weighted else (None, None)
    y = F.layer_norm(x, [12], w, b, 1e-3) if centred else F.rms_norm(x, [12], w, 1e-3)
    want = torch.autograd.grad(y, leaves, gradient, allow_unused=True)
    got, sums = norm_gradients(gradient, x.detach(), w, 1e-3, centred, beside, 3)
    torch.testing.assert_close(got, want[0] + beside)
    for sum_, grad in zip(sums.sum(0), want[1:], strict=False):
        if grad is not None:
            torch.testing.assert_close(sum_, grad)


@pytest.mark.nvrtc
@pytest.mark.parametrize("columns", [192, 384, 1024])
@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.every(3)
def test_compiles_without_spills(columns: int, centred: bool) -> None:
    lanes = kernel(NormGradients(columns, "bf16", centred, True, True))
    made = compile_text(lanes.text, NAME, lanes.shared_bytes)
    assert made.spills == 0 and made.stack == 0


def test_what_has_no_kernel() -> None:
    assert not any(NormGradients(n, "bf16", True, True, False).taken for n in (0, 129, 1026))
    vectors = {n: NormGradients(n, "bf16", True, True, False).vector for n in (64, 96, 192, 384, 768)}
    assert vectors == {64: 2, 96: 4, 192: 2, 384: 4, 768: 8}
