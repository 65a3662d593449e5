"""Layers over tokens: the kernel on the host, and compiled; what it is predicted to take."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from host_runs import gxx, is_caught
from mixer_blocks import by_functional, given, is_right
from sass import disassemble, disassembler, loops_keep_their_operands
from torch import Tensor

from tilestream.cuda.compile import compile_text
from tilestream.cuda.host.build import HostRun
from tilestream.cuda.host.lanes import on_lanes
from tilestream.cuda.host.maps import encoded
from tilestream.cuda.token_mixing import call
from tilestream.devices import get
from tilestream.graph.token_mixing import token_mixing
from tilestream.kernels.operators.token_mixing import NAME, Mixing, kernel
from tilestream.plan.token_mixing import Kind, library, ours

CASES: dict[str, tuple[Mixing, int]] = {
    "Mixer's tokens, a cluster of two": (Mixing(196, 128, 136, "bf16", True, True), 1),
    "rows of 4 bytes, hidden columns that stick out": (Mixing(50, 136, 296, "f16", True, True, "silu"), 2),
    "one CTA an image, f16": (Mixing(64, 64, 72, "f16", True, False, "gelu_tanh"), 3),
    "no norm": (Mixing(36, 200, 136, "bf16", False, True, "relu"), 2),
    "the most tokens, layers alone": (Mixing(256, 72, 64, "bf16", False, False), 1),
}


def on_host(operands: list[Any], options: HostRun | None = None) -> Tensor:
    return on_lanes(lambda address: call(operands, address, encoded), options=options)[0]


@gxx
@pytest.mark.parametrize("name", CASES)
def test_values(name: str) -> None:
    operands = given(*CASES[name])
    assert is_right(on_host(operands), operands)


@gxx
def test_without_vectors_from_images_that_lie_anywhere() -> None:
    mixing = Mixing(36, 64, 72, "bf16", True, True)
    operands = given(mixing, 2)
    for k in (1, 2, 5, 7):
        operands[k] = None
    whole = torch.randn(2, 37, 80).bfloat16()
    operands[0], operands[10] = whole[:, 1:, 8:], whole[:, :36, 3:75]
    assert is_right(on_host(operands), operands)


@gxx
def test_warps_do_not_race() -> None:
    operands = given(*CASES["rows of 4 bytes, hidden columns that stick out"])
    assert is_right(on_host(operands, HostRun(sanitize=True)), operands)


MUTANTS = {
    "a slot is filled while it is read": ("    bar_wait(full + 8, parity);\n", "", False),
    "a weight is read too early": ("      copies_wait();\n", "", False),
    "the other CTAs' channels are not waited for": ("CLUSTER > 1)\n    cl", "CLUSTER > 9)\n    cl", True),
    "the norm of a part alone": ("part < PARTS * GROUPS", "part < GROUPS", False),
    "means that differ": ("fma_(far * far, quotient(all * n, both), s)", "s", False),
    "zeros behind the last channel count": ("left < 0 ? 0 : left < 64 ? left : 64", "64", False),
    "rows behind the last hidden one": ("hidden < HIDDEN && ", "", False),
    "the residual of the first warpgroup for both": ("residual + g * IMAGE_BYTES", "residual", False),
    "another image's": ("at.channel + 64 * g, 0, 0, at.image, image", "at.channel + 64 * g, 0, 0, 0, image", False),
    "hidden columns stay": ("b + (k / 4) * (CHUNK_BYTES / 16) +", "b +", False),
}  # fmt: skip


@gxx
@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.every(3)
def test_mutants_are_caught(name: str) -> None:
    def right(case: str, options: HostRun) -> bool:
        operands = given(*CASES[case])
        return is_right(on_host(operands, options), operands)

    cases = ("rows of 4 bytes, hidden columns that stick out", "Mixer's tokens, a cluster of two")
    assert any(is_caught(partial(right, case), "token_mixing.cuh", *MUTANTS[name], limit_s=2.0) for case in cases)


def test_what_it_means() -> None:
    for mixing, images in CASES.values():
        operands = given(mixing, images)
        exact = [t.double() if isinstance(t, Tensor) else t for t in operands]
        torch.testing.assert_close(token_mixing(*exact), by_functional(operands))
        assert is_right(token_mixing(*operands), operands)


SHAPES = [
    Mixing(196, 256, 512, "bf16", True, True), Mixing(196, 384, 768, "f16", True, True, "gelu_tanh"),
    Mixing(256, 512, 1024, "bf16", True, True, "silu"), Mixing(64, 128, 200, "bf16", False, False, "relu"),
]  # fmt: skip


@pytest.mark.nvrtc
@pytest.mark.parametrize("mixing", SHAPES)
def test_compiles_without_spills(mixing: Mixing) -> None:
    made = compile_text(kernel(mixing).text, NAME, mixing.shared_bytes)
    assert mixing.taken and made.spills == 0 and made.stack == 0 and mixing.shared_bytes <= 232448
    if disassembler() is not None:
        code = disassemble(made.cubin)
        assert code.having("HGMMA") and code.having("UTMALDG") and code.having("UTMASTG")
        assert not loops_keep_their_operands(code) and not code.having("LDL", "STL")


def test_what_has_no_kernel() -> None:
    for mixing in (Mixing(258, 64, 64), Mixing(49, 64, 64), Mixing(64, 60, 64), Mixing(64, 64, 100), Mixing(64, 64, 0)):
        assert not mixing.taken
    assert not Mixing(64, 64, 1032, normed=True).taken and Mixing(64, 64, 1032).taken


def test_predictions() -> None:
    """Of Mixer S/16 on 32 images: more than its two products at the tensor cores' rate, less than the library's."""
    kind, device = Kind(SHAPES[0], 32), get("h200")
    least = 2e6 * kind.product_flops / device.tensor_flops["bf16"]
    assert 2 * least < ours(kind, device).us < 0.8 * library(kind, device).us
    assert ours(Kind(SHAPES[0], 1), device).us > library(Kind(SHAPES[0], 1), device).us  # a few SMs at work
