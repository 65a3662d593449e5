"""Gates of squeeze and excite on the GPU: against float64, the same bits every time, and in CUDA graphs.

``test_gpu_depthwise`` has models with them.
"""

from __future__ import annotations

import pytest
import torch
from gates import Case, given, is_right

from tilestream.graph.squeeze import SQUEEZE
from tilestream.kernels.operators.squeeze import Squeeze
from tilestream.run.timing import capture

pytestmark = pytest.mark.gpu

CASES: list[Case] = [
    (Squeeze(32, 8, "bf16", "silu", "sigmoid"), 64, 1792),
    (Squeeze(600, 22, "f16", "relu", "hardsigmoid"), 3, 5),
    (Squeeze(1152, 48, "bf16", "silu", "sigmoid"), 300, 7),
    (Squeeze(2400, 10, "bf16", "relu", "sigmoid"), 1, 1),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_values(case: Case) -> None:
    operands = given(case, "cuda")

    def run() -> torch.Tensor:
        return SQUEEZE(*operands)

    got = run()
    assert is_right(got, operands)
    assert torch.equal(got, run())
    graph = capture(lambda: [run()])
    graph.outputs[0].fill_(float("nan"))  # pyright: ignore[reportIndexIssue]
    graph.graph.replay()
    assert torch.equal(graph.outputs[0], got)  # pyright: ignore[reportIndexIssue]


def test_biases_that_start_anywhere_and_none() -> None:
    operands = given(CASES[1], "cuda")
    operands[3] = torch.randn(23, device="cuda").half()[1:]
    operands[5] = None
    assert is_right(SQUEEZE(*operands), operands)
