"""Gates of squeeze and excite: the kernel on the host, a fiber a lane, and compiled; what it is predicted to take."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from gates import Case, given, is_right
from host_runs import gxx, is_caught
from torch import Tensor

from tilestream.cuda.compile import compile_text
from tilestream.cuda.host.build import HostRun, HostTrap, Mutation
from tilestream.cuda.host.lanes import on_lanes
from tilestream.cuda.squeeze import call
from tilestream.devices import get
from tilestream.graph.squeeze import squeeze
from tilestream.kernels.operators.squeeze import NAME, Squeeze, kernel
from tilestream.plan.squeeze import Kind, library, ours

CASES: dict[str, Case] = {
    "more rows of sums than lanes hold": (Squeeze(32, 8, "bf16", "silu", "sigmoid"), 2, 300),
    "lanes without a row": (Squeeze(600, 22, "f16", "relu", "hardsigmoid"), 1, 5),
    "one slice": (Squeeze(2400, 10, "bf16", "silu", "sigmoid"), 1, 3),
}


def on_host(operands: list[Any], options: HostRun | None = None) -> Tensor:
    return on_lanes(lambda address: call(operands, address), options=options)[0]


@gxx
@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    operands = given(CASES[name])
    assert is_right(on_host(operands), operands)


@gxx
def test_without_biases() -> None:
    operands = given(CASES["lanes without a row"])
    operands[3] = operands[5] = None
    assert is_right(on_host(operands), operands)


@gxx
def test_lanes_do_not_race() -> None:
    operands = given(CASES["more rows of sums than lanes hold"])
    assert is_right(on_host(operands, HostRun(sanitize=True)), operands)


@gxx
def test_a_lane_that_does_not_come_is_seen_at_once() -> None:
    absent = Mutation(
        "squeeze.cuh",
        "  lanes::all_together();\n  if (slice == 0)",
        "  if (lanes::thread() != 3) lanes::all_together();\n  if (slice == 0)",
    )
    with pytest.raises(HostTrap, match="a lane did not come"):
        on_host(given(CASES["one slice"]), HostRun(mutations=(absent,)))


@gxx
def test_any_order_of_lanes_gives_the_same_bits() -> None:
    operands = given(CASES["more rows of sums than lanes hold"])
    first, *others = (on_host(operands, HostRun(seed=seed)) for seed in range(4))
    assert all(torch.equal(first, other) for other in others)


MUTANTS = {
    "sums are read too early": ("  lanes::all_together();\n  if (slice == 0)", "  if (slice == 0)", True),
    "the hidden layer is read too early": ("  lanes::all_together();\n  for (int c", "  for (int c", True),
    "one slice alone": ("other < SLICES", "other < 1", False),
    "sums for means": ("sum[e] * p.share", "sum[e]", False),
    "another picture's sums": ("(u64)lanes::block() * p.parts", "(u64)0 * p.parts", False),
    "every other lane's part of a hidden sum": ("far > 0", "far > 1", False),
    "no second bias": ("bias_of(p.b2, c)", "0.0f", False),
}  # fmt: skip


@gxx
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.every(4)
def test_mutants_are_caught(name: str) -> None:
    operands = given(CASES["more rows of sums than lanes hold"])
    assert is_caught(lambda options: is_right(on_host(operands, options), operands), "squeeze.cuh", *MUTANTS[name])


def test_what_it_means() -> None:
    sums, share, first, b1, second, b2, *names = given(CASES["lanes without a row"])
    x = sums.double().view(1, 5, 1, 600).permute(0, 3, 1, 2).mean((2, 3), keepdim=True)
    hidden = torch.nn.functional.conv2d(x, first.double(), b1.double()).relu()
    want = torch.nn.functional.hardsigmoid(torch.nn.functional.conv2d(hidden, second.double(), b2.double()))
    layers = (t.double() for t in (first, b1, second, b2))
    torch.testing.assert_close(squeeze(sums.double(), share, *layers, *names), want.flatten(1))  # pyright: ignore


@pytest.mark.nvrtc
@pytest.mark.parametrize("name", CASES)
def test_compiles_without_spills(name: str) -> None:
    lanes = kernel(CASES[name][0])
    made = compile_text(lanes.text, NAME, lanes.shared_bytes)
    assert made.spills == 0 and made.stack == 0 and made.registers <= 64


def test_what_has_no_kernel() -> None:
    for shape in ((30, 8, "silu", "sigmoid"), (32, 7, "silu", "sigmoid"), (32, 8, "gelu", "sigmoid")):
        assert not Squeeze(*shape[:2], "bf16", *shape[2:]).taken
    assert Squeeze(32, 8, "bf16", "silu", "sigmoid").taken and not Squeeze(32, 8, "bf16", "silu", "tanh").taken


def test_predictions() -> None:
    """EfficientNet-B0's on 64 pictures; and of one large picture, whose sums a CTA adds up alone."""
    for channels, hidden, parts in ((32, 8, 1792), (672, 28, 28), (1152, 48, 7)):
        kind = Kind(Squeeze(channels, hidden, "bf16", "silu", "sigmoid"), parts, 64)
        assert get("h200").launch_s * 1e6 < ours(kind, get("h200")).us < library(kind, get("h200")).us
    large = Kind(Squeeze(32, 8, "bf16", "silu", "sigmoid"), 1 << 15, 1)
    assert ours(large, get("h200")).us > library(large, get("h200")).us
