"""Layers over tokens on the GPU: against float64, the same bits every time, in CUDA graphs and in models."""

from __future__ import annotations

import copy

import pytest
import torch
from mixer_blocks import BF16, Mixer, given, is_right

from tilestream.graph.token_mixing import TOKEN_MIXING
from tilestream.kernels.operators.token_mixing import Mixing
from tilestream.run.backend import tilestream
from tilestream.run.timing import capture

pytestmark = pytest.mark.gpu

CASES: list[tuple[Mixing, int]] = [
    (Mixing(196, 256, 512, "bf16", True, True), 32),
    (Mixing(196, 384, 768, "f16", True, True, "gelu_tanh"), 45),
    (Mixing(256, 512, 1024, "bf16", True, True, "silu"), 40),
    (Mixing(50, 136, 296, "bf16", True, True, "relu"), 7),
    (Mixing(64, 64, 72, "f16", True, False), 300),
    (Mixing(144, 1000, 1416, "bf16", False, True), 3),
    (Mixing(2, 8, 8, "bf16", False, False), 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case: tuple[Mixing, int]) -> None:
    operands = given(*case, "cuda")

    def run() -> torch.Tensor:
        return TOKEN_MIXING(*operands)

    got = run()
    assert is_right(got, operands)
    assert torch.equal(got, run())
    graph = capture(lambda: [run()])
    graph.outputs[0].fill_(float("nan"))  # pyright: ignore[reportIndexIssue]
    graph.graph.replay()
    assert torch.equal(graph.outputs[0], got)  # pyright: ignore[reportIndexIssue]


def test_operands_that_start_anywhere() -> None:
    operands = given(Mixing(36, 64, 72, "bf16", True, True), 2, "cuda")
    whole = torch.randn(2, 37, 80, device="cuda").bfloat16()
    operands[0], operands[10] = whole[:, 1:, 8:], whole[:, :36, 3:75]
    operands[5] = torch.randn(65, device="cuda").bfloat16()[1:]
    assert is_right(TOKEN_MIXING(*operands), operands)


@pytest.mark.parametrize("lies", ["channels last", "tokens last"])
def test_models(lies: str) -> None:
    model = torch.nn.Sequential(Mixer(196, 512, 256), Mixer(196, 512, 256)).to(BF16).eval().cuda()
    x = torch.randn(32, 196, 512, device="cuda").bfloat16()
    x = x if lies == "channels last" else x.transpose(1, 2).contiguous().transpose(1, 2)
    compiled = torch.compile(model, backend=tilestream, options={"token_mixing": True})
    with torch.no_grad():
        exact, eager, got = copy.deepcopy(model).double()(x.double()), model(x), compiled(x)
        again = compiled(x)
    assert (got - exact).norm() <= 2 * (eager - exact).norm()
    assert torch.equal(got, again)
