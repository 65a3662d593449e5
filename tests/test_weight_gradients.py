"""Weight gradients of backward graphs as calls of stationary sums: which are found, and what training gets."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch._functorch._aot_autograd.utils import make_boxed_func

from tilestream.devices import get
from tilestream.graph.gradients import GradientSite, find_gradients
from tilestream.run.gradients import WEIGHT_GRADIENT, stream_gradients

ROWS = 130


def backward(model: nn.Module, x: torch.Tensor, least_rows: int = 1) -> tuple[list[GradientSite], torch.fx.GraphModule]:
    """A training step with gradients on the reference machine: what was streamed, and the backward graph."""
    torch._dynamo.reset()
    seen: list[tuple[list[GradientSite], torch.fx.GraphModule]] = []

    def compile_backward(graph, inputs):
        seen.append((stream_gradients(graph, get("h200"), least_rows), graph))
        return make_boxed_func(graph)

    compiled = torch.compile(
        model, backend=aot_autograd(fw_compiler=lambda g, _: make_boxed_func(g), bw_compiler=compile_backward)
    )
    compiled(x).square().mean().backward()
    return seen[0]


def mlp(bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Linear(24, 40, bias=bias), nn.ReLU(), nn.Linear(40, 8, bias=bias)).bfloat16()


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(ROWS, 24), (2, 65, 24)])
def test_a_training_step_has_eagers_gradients(bias: bool, shape: tuple[int, ...]) -> None:
    model, x = mlp(bias), torch.randn(shape).bfloat16()
    eager, exact = copy.deepcopy(model), copy.deepcopy(model).double()
    eager(x).square().mean().backward()
    exact(x.double()).square().mean().backward()
    streamed, graph = backward(model, x)
    assert [(s.out, s.k, s.rows, s.total is not None) for s in streamed] == [(8, 40, ROWS, bias), (40, 24, ROWS, bias)]
    calls = [n for n in graph.graph.nodes if n.target is WEIGHT_GRADIENT]
    assert len(calls) == 2 and find_gradients(graph.graph) == []
    for got, own, want in zip(model.parameters(), eager.parameters(), exact.parameters(), strict=True):
        assert got.grad is not None and own.grad is not None and want.grad is not None
        error, allowed = ((g.grad.double() - want.grad).norm() for g in (got, own))  # pyright: ignore
        assert error <= 2 * allowed + 1e-3 * want.grad.norm()


def test_few_rows_and_wide_layers_are_left_to_the_library() -> None:
    streamed, graph = backward(mlp(), torch.randn(ROWS, 24).bfloat16(), least_rows=ROWS + 1)
    assert streamed == [] and len(find_gradients(graph.graph)) == 2
    wide = nn.Linear(4096, 2048).bfloat16()  # 16 x 16 blocks > 132 SMs
    streamed, graph = backward(wide, torch.randn(ROWS, 4096).bfloat16())
    assert streamed == [] and len(find_gradients(graph.graph)) == 1


def test_fp32_gradients_are_not_found() -> None:
    _, graph = backward(mlp().float(), torch.randn(ROWS, 24))
    assert find_gradients(graph.graph) == []


def test_the_operator_keeps_torchs_rules() -> None:
    dy, x = torch.randn(70, 16).bfloat16(), torch.randn(70, 24).bfloat16()
    torch.library.opcheck(WEIGHT_GRADIENT, (dy, x, True, "h200"))
    weight, bias = WEIGHT_GRADIENT(dy[:0], x[:0], True, "h200")
    assert torch.equal(weight, torch.zeros(16, 24).bfloat16()) and torch.equal(bias, torch.zeros(16).bfloat16())
