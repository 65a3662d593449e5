"""Gradients of norms, and derivatives that are saved, on the GPU: kernels and transformers' steps."""

from __future__ import annotations

import copy

import pytest
import torch
from norms import CASES, Case, given, is_right
from torch import Tensor, nn
from torch.nn import functional as F

from tilestream.graph.rewrites.norm_sums import NORM_GRADIENTS
from tilestream.run.backend import tilestream
from tilestream.run.timing import capture

pytestmark = pytest.mark.gpu

LARGE = {
    "all SMs": Case(12_608, 192, 394, beside=True),
    "long rows": Case(4_099, 1024, 132, centred=False),
    "short rows": Case(50_177, 96, 528),
}


@pytest.mark.parametrize("name", [*CASES, *LARGE])
def test_values(name: str) -> None:
    operands = given((CASES | LARGE)[name], "cuda")

    def run() -> list[Tensor]:
        return [*NORM_GRADIENTS(*operands)]

    got = run()
    assert is_right(got, operands)
    graph = capture(run)
    results: list[Tensor] = graph.outputs  # pyright: ignore[reportAssignmentType]
    for result in results:
        result.fill_(float("nan"))
    graph.graph.replay()
    assert all(torch.equal(a, b) for a, b in zip(results, got, strict=True))


def test_rows_that_start_anywhere() -> None:
    operands = given(CASES["three vectors"], "cuda")
    operands[0] = torch.cat([operands[0].flatten()[:3], operands[0].flatten()])[3:].view_as(operands[0])
    assert is_right(NORM_GRADIENTS(*operands), operands)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


@pytest.mark.parametrize("width", [192, 768])
def test_steps_of_blocks(width: int) -> None:
    """Gradients within twice eager's error, of norms that were opened and of wider ones; the same bits twice."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(width, width), Block(width), Block(width)).cuda().bfloat16()
    x = torch.randn(16, 197, width, device="cuda").bfloat16()
    reference = copy.deepcopy(model).double()

    def gradients(module: nn.Module, run: nn.Module, rows: Tensor) -> list[Tensor]:
        module.zero_grad()
        run(rows).square().mean().backward()
        return [p.grad.clone() for p in module.parameters() if p.grad is not None]

    want = gradients(reference, reference, x.double())
    eager = gradients(model, model, x)
    fast = torch.compile(model, backend=tilestream)
    got, again = gradients(model, fast, x), gradients(model, fast, x)
    for w, e, a, b in zip(want, eager, got, again, strict=True):
        assert torch.equal(a, b)
        assert (a - w).norm() <= 2 * (e - w).norm() + 1e-3 * w.norm()
