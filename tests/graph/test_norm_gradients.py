"""Derivatives of norms, softmax and activations in regions of training graphs."""

from __future__ import annotations

import copy
import math
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from host_runs import check as check_on_host
from on_reference import compiled
from torch import Tensor, fx, nn
from torch.nn import functional as F

from tilestream.devices import get
from tilestream.graph.capture import capture
from tilestream.graph.cut import Cutter
from tilestream.graph.nodes import aten, packet
from tilestream.graph.operators.backward import SIGMOID_IS_ONE
from tilestream.graph.rewrites.row_sums import copy_sums_operands
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.rewrites.table import rewrite
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.plan.analyse import analyse
from tilestream.plan.find import kept_out
from tilestream.plan.parts import RegionAnalysis
from tilestream.run import prepare

ROWS, WIDTH = 130, 32

pytestmark = pytest.mark.usefixtures("fresh")

CHAINS: dict[str, tuple[Callable[[Tensor], Tensor], ...]] = {
    "smooth": (F.gelu, F.silu, torch.tanh, F.softplus, F.mish, lambda x: F.gelu(x, approximate="tanh"), torch.sigmoid),
    "pieces": (F.elu, F.leaky_relu, F.hardswish, F.hardsigmoid, F.relu6, F.selu, F.celu, F.softsign),
    "parameters": (
        lambda x: F.elu(x, 0.7),
        lambda x: F.leaky_relu(x, -0.3),
        lambda x: F.softplus(x, 3.0, 1.5),
        lambda x: F.celu(x, 0.4),
        lambda x: F.glu(torch.cat([x, x.tanh()], -1), -1),
    ),
    "norms": (
        nn.LayerNorm(WIDTH),
        nn.LayerNorm(WIDTH, elementwise_affine=False),
        nn.LayerNorm(WIDTH, eps=1e-2, bias=False),
        nn.RMSNorm(WIDTH),
        nn.RMSNorm(WIDTH, eps=1e-3),
        nn.Softmax(-1),
        nn.LogSoftmax(-1),
    ),
}


class Chain(nn.Module):
    """A linear layer before each of some functions, and one at the end; gradients of all their slopes, none summed."""

    def __init__(self, functions: Sequence[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in functions)
        self.functions = functions
        self.parts = nn.ModuleList(f for f in functions if isinstance(f, nn.Module))
        self.last = nn.Linear(WIDTH, 8)
        for p in self.parameters():
            nn.init.normal_(p, 1.0 if p.dim() == 1 else 0.0, 0.3)

    def forward(self, x: Tensor) -> Tensor:
        for layer, function in zip(self.layers, self.functions, strict=True):
            x = function(layer(x))
        return self.last(x)


def train(module: nn.Module, rows: int = ROWS) -> list[RegionAnalysis]:
    """One step compiled for the reference machine; its gradients are at most twice as far off as eager's."""
    own, exact = copy.deepcopy(module), copy.deepcopy(module).double()
    x, target = torch.randn(rows, WIDTH), torch.randn(rows, 8).double()
    x = x.to(next(module.parameters()).dtype)
    before = len(prepare.analyses())
    for function, given in ((compiled(module, strategy="vertical"), x), (own, x), (exact, x.double())):
        (function(given).double() - target).square().mean().backward()
    for got, eager, want in zip(module.parameters(), own.parameters(), exact.parameters(), strict=True):
        assert got.grad is not None and eager.grad is not None and want.grad is not None
        error, allowed = ((g.grad.double() - want.grad).norm() for g in (got, eager))  # pyright: ignore
        assert error <= 2 * allowed + 1e-3 * want.grad.norm()
    return [a for a in prepare.analyses()[before:] if a.kind == "region"]


@pytest.mark.parametrize("name", CHAINS)
@pytest.mark.every(2)
def test_a_chain_of_derivatives_is_one_region(name: str, plain: None) -> None:
    """With every product of the chain but the first layer's: its input wants no gradient."""
    forward, backward = train(Chain(CHAINS[name]).bfloat16())
    assert _kinds(forward).count("linear") == len(CHAINS[name]) + 1
    assert _kinds(backward).count("linear") == len(CHAINS[name])


@pytest.mark.parametrize(("threshold", "chosen"), [(20.0, 0), (SIGMOID_IS_ONE, 0), (1.5, 2)])
def test_softplus_chooses_above_its_threshold_where_the_sigmoid_is_not_one(threshold: float, chosen: int, plain: None):
    """The gradient itself above it, by a step and a maximum; where fp32 has no number between, by the sigmoid alone."""
    softplus = (lambda x: F.softplus(8 * x, 1.0, threshold),) * 2
    _, backward = train(Chain(softplus).bfloat16())
    kinds = _kinds(backward)
    assert [kinds.count(kind) for kind in ("sigmoid", "maximum", "relu_backward")] == [2, chosen, chosen]
    assert torch.tensor(SIGMOID_IS_ONE).sigmoid() == 1 > torch.tensor(16.0).sigmoid()


class Fused(nn.Module):
    """RMSNorm as one operator, as it is traced on GPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        return torch.ops.aten._fused_rms_norm(x, [WIDTH], self.weight, 1e-3)[0]


def test_a_fused_rms_norm(plain: None) -> None:
    forward, backward = train(Chain([Fused(), F.silu]).bfloat16())
    assert _kinds(forward).count("rms_norm") == 1 and _kinds(backward).count("rsqrt") == 1


def test_statistics_leave_as_columns() -> None:
    """For the gradient of the norm's weight alone, which Inductor compiles; the norm's result is made again."""
    forward, backward = train(Chain([nn.LayerNorm(WIDTH), F.silu]).half())
    assert _kinds(forward).count("layer_norm") == 1 and _kinds(backward).count("linear") == 2
    columns = [t for t in backward.program.by_role(Role.OUTPUT) if t.features == 1]
    assert [t.dtype for t in columns] == ["f32", "f32"]


def _kinds(region: RegionAnalysis) -> list[str]:
    return [op.kind for op in region.program.stages[0].ops]


# -- the graphs ---------------------------------------------------------------------------------


def graphs(module: nn.Module, *inputs: Tensor) -> list[fx.GraphModule]:
    return list(capture(module, inputs, training=True, partition=Cutter(Settings(1))).graphs)


def ops(graph: fx.GraphModule) -> list[Any]:
    return [packet(n) for n in graph.graph.nodes if n.op == "call_function"]


def test_wide_norms_stay_whole() -> None:
    def derivatives(width: int) -> list[bool]:
        module = nn.Sequential(nn.Linear(16, width), nn.LayerNorm(width)).bfloat16()
        _, backward = graphs(module, torch.randn(70, 16).bfloat16())
        return [aten.native_layer_norm_backward in ops(backward), aten.rsqrt in ops(backward)]

    assert derivatives(512) == [False, True] and derivatives(1032) == [True, False]
    assert derivatives(520) == [False, False]  # one operator of ours has them (``test_norm_sums``)


class Meaned(nn.Module):
    """The derivative of a mean is a column that autograd repeats over the features."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(16, 24), nn.Linear(24, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        return self.last(h * (1 + h.mean(-1, keepdim=True)))


def test_repeated_columns_are_columns() -> None:
    _, backward = graphs(Meaned().bfloat16(), torch.randn(70, 16).bfloat16())
    assert aten.expand not in ops(backward)
    made = analyse(Meaned().bfloat16(), (torch.randn(70, 16).bfloat16(),), device=get("h200"), training=True)
    assert [e.op for e in made.exclusions if "expand" in e.op or "div" in e.op] == []


def test_sums_over_rows_have_operators_of_their_own() -> None:
    module = Chain([nn.LayerNorm(WIDTH), F.silu]).bfloat16()
    _, backward = graphs(module, torch.randn(ROWS, WIDTH).bfloat16())
    before = len(ops(backward))
    rewrite(backward, copy_sums_operands)
    names = kept_out(backward.graph)
    nodes = {n.name: n for n in backward.graph.nodes}
    assert names and all(set(nodes[n].users) for n in names)
    for name in names:  # all that is read from elsewhere is narrow, or of 16 bits
        for operand in nodes[name].all_input_nodes:
            value = operand.meta["val"]
            assert operand.name in names or value.element_size() == 2 or value.shape[-1] == 1
    assert len(ops(backward)) - before <= len(names)


# -- kernels ------------------------------------------------------------------------------------


def backward_program(width: int = 64) -> Pipeline:
    """The backward region of an MLP that ends with LayerNorm: dLN, dX, dReLU, dX."""
    module = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width), nn.LayerNorm(width)).bfloat16()
    x = torch.randn(200, width).bfloat16().requires_grad_()
    made = analyse(module, (x,), device=get("h200"), training=True)
    (region,) = [r for r in made.regions if r.name == "graph1.region0" or r.name.endswith("1.region0")]
    assert region.plan is not None and region.plan.chosen.pipeline is not None
    return region.program


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_the_kernel_on_the_host(folder: Path) -> None:
    check_on_host(backward_program(), 130, folder)


@pytest.mark.nvrtc
def test_the_kernel_has_no_spills() -> None:
    pytest.importorskip("cuda.bindings.nvrtc")
    from tilestream import cuda

    for kernel in cuda.compile_only(backward_program(128)):
        assert kernel.spills == 0 and not math.isnan(kernel.registers), kernel.log
