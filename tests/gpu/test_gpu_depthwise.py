"""Depthwise convolutions on the GPU: against float64, the same bits every time, in CUDA graphs and in models."""

from __future__ import annotations

import copy

import pytest
import torch
from depthwise_blocks import BF16, F16, Case, Grouped, Inverted, Next, given, is_right, ready

from tilestream.graph.depthwise import DEPTHWISE
from tilestream.run.backend import tilestream
from tilestream.run.timing import capture

pytestmark = pytest.mark.gpu

CASES: list[Case] = [
    ((4, 56, 56, 96), (7, 7), 1, (3, 3), "none", (4, 8), BF16),
    ((2, 28, 29, 192), (7, 7), 1, (3, 3), "gelu", (3, 7), F16),
    ((3, 7, 7, 768), (7, 7), 1, (3, 3), "none", (1, 7), BF16),
    ((5, 56, 56, 144), (5, 5), 2, (2, 2), "silu", (1, 7), BF16),
    ((64, 14, 14, 480), (3, 3), 1, (1, 1), "silu", (2, 7), F16),
    ((1, 33, 17, 20), (3, 5), 1, (0, 2), "hardswish", (3, 4), BF16),
    ((9, 6, 5, 14), (2, 2), 2, (1, 0), "relu6", (1, 8), F16),
]


GROUPED: list[tuple[int, Case]] = [
    (24, ((4, 28, 28, 216), (3, 3), 1, (1, 1), "relu", (7, 28), BF16)),
    (24, ((3, 28, 29, 96), (3, 3), 2, (1, 1), "none", (4, 14), F16)),
    (4, ((2, 17, 56, 128), (3, 3), 1, (1, 1), "silu", (6, 7), BF16)),
    (8, ((5, 13, 9, 64), (5, 3), 1, (2, 1), "gelu", (5, 9), F16)),
    (64, ((2, 14, 14, 256), (3, 3), 1, (1, 1), "relu6", (7, 14), BF16)),
    (2, ((3, 9, 10, 24), (3, 3), 2, (1, 1), "hardswish", (5, 3), BF16)),
]


@pytest.mark.parametrize(("group", "case"), [*((1, case) for case in CASES), *GROUPED], ids=str)
def test_values(group: int, case: Case) -> None:
    _, _, stride, padding, activation, tile, _ = case
    x, weight, *vectors = given(case, "cuda", group)

    def run() -> list[torch.Tensor]:
        return DEPTHWISE(x, weight, *vectors, stride, padding, activation, tile, True)  # pyright: ignore

    got = run()
    assert is_right(got, case, [x, weight, *vectors])
    assert all(map(torch.equal, got, run()))
    graph = capture(run)
    for output in graph.outputs:  # pyright: ignore[reportGeneralTypeIssues]
        output.fill_(float("nan"))
    graph.graph.replay()
    assert all(map(torch.equal, graph.outputs, got))


def test_operands_that_start_anywhere() -> None:
    """Vectors of a longer one, and pictures behind others."""
    case = ((2, 9, 8, 12), (3, 3), 1, (1, 1), "silu", (2, 8), BF16)
    x, weight, bias, *_ = given(case, "cuda")
    scale, shift = torch.randn(31, device="cuda")[2:26].split(12)
    whole = torch.randn(3 * 864 + 1, device="cuda").bfloat16()
    x = whole[1:1729].view(2, 9, 8, 12)
    got = DEPTHWISE(x, weight, bias, scale, shift, 1, (1, 1), "silu", (2, 8), True)
    assert is_right(got, case, [x, weight, bias, scale, shift])


MODELS = {
    "inverted": (64, (Inverted(64), Inverted(64, 5, 2), Inverted(64, 5))),
    "next": (96, (Next(96), Next(96))),
    "grouped": (48, (Grouped(), Grouped(stride=2), Grouped(group=8))),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str) -> None:
    channels, blocks = MODELS[name]
    model = ready(*blocks).cuda()
    x = torch.randn(8, channels, 56, 56, device="cuda").bfloat16()
    x = x.to(memory_format=torch.channels_last)
    compiled = torch.compile(model, backend=tilestream)
    with torch.no_grad():
        exact, eager, got = copy.deepcopy(model).double()(x.double()), model(x), compiled(x)
        again = compiled(x)
    assert (got - exact).norm() <= 2 * (eager - exact).norm()
    assert torch.equal(got, again) and got.stride() == eager.stride()
