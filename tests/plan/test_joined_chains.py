"""Regions joined with the sums of their gradients: which are, into how many launches, and what gradients they give."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from streamed import eagerly
from torch import Tensor, nn

from tilestream import reference
from tilestream.apps.models import MODELS
from tilestream.cuda.host.build import HostRun, run_on_host
from tilestream.graph import kept
from tilestream.ir.dtypes import TORCH_DTYPES
from tilestream.ir.pipeline import Pipeline, Role
from tilestream.kernels.gradients import builds
from tilestream.kernels.gradients.layouts import Kind
from tilestream.run import inductor, oracle, prepare
from tilestream.run.chain_calls import ChainCalls
from tilestream.run.place import Calls

ROWS = 200


def mlp(hidden: int, width: int = 64, bias: bool = False, slope: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """tiny-cuda-nn's: ``hidden`` layers of one width, an output of 16."""
    torch.manual_seed(0)
    layers = [m for _ in range(hidden) for m in (nn.Linear(width, width, bias=bias), slope())]
    return nn.Sequential(*layers, nn.Linear(width, 16, bias=bias)).half()


def gradients(model: Any, module: nn.Module, x: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
    return torch.autograd.grad(model(x), [*([x] if x.requires_grad else []), *module.parameters()], dy)


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Pipeline, ...]]:
    """The launches of each pair that is joined while a test runs."""
    found: list[tuple[Pipeline, ...]] = []
    put = Calls.of_chain

    def noted(self: Calls, chain: ChainCalls) -> None:
        found.append(chain.pair.joined.pipelines)
        put(self, chain)

    monkeypatch.setattr(Calls, "of_chain", noted)
    return found


def check(module: nn.Module, x: Tensor, **options: Any) -> None:
    """Gradients through ``torch.compile`` are as near to float64 as eager's, or at twice its distance at most."""
    torch.compiler.reset()
    compiled = torch.compile(module, backend="tilestream", options={"target": "reference", **options})
    dy = torch.randn(*x.shape[:-1], [*module.parameters()][-1].shape[0], dtype=x.dtype)
    wide, x64 = copy.deepcopy(module).double(), x.detach().double().requires_grad_(x.requires_grad)
    got, own = gradients(compiled, module, x, dy), gradients(module, module, x, dy)
    want = gradients(wide, wide, x64, dy.double())
    for mine, eager, exact in zip(got, own, want, strict=True):
        assert mine.dtype == eager.dtype and mine.shape == eager.shape
        allowed = 2 * (eager.double() - exact).norm() + 1e-4 * exact.norm()
        assert (mine.double() - exact).norm() <= allowed


def inputs(*shape: int, wants_gradient: bool = True) -> Tensor:
    torch.manual_seed(1)
    return torch.randn(*shape).half().requires_grad_(wants_gradient)


def test_a_chain_is_one_launch(joined: list[tuple[Pipeline, ...]]) -> None:
    check(mlp(2), inputs(ROWS, 64))
    ((chain,),) = joined
    found = builds(chain)[0].chain
    assert [(x.out, x.k) for x in found.layers] == [(16, 64), (64, 64), (64, 64)] and found.result


def test_biases_other_widths_no_dx_and_leading_dimensions(joined: list[tuple[Pipeline, ...]]) -> None:
    check(mlp(2, 32, bias=True), inputs(10, 20, 32, wants_gradient=False))
    ((chain,),) = joined
    found = builds(chain)[0].chain
    assert not found.result and all(layer.bias_gradient for layer in found.layers)


def test_gradients_of_widths_that_bulk_copies_cannot_address(joined: list[tuple[Pipeline, ...]]) -> None:
    """Three colours: the sums took them with columns of zeros, a chain reads them as they are."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(27, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)).half()
    check(module, inputs(ROWS, 27, wants_gradient=False))
    ((chain,),) = joined
    assert builds(chain)[0].odd and builds(chain)[0].chain.layers[0].out == 3


def test_a_long_chain_is_cut_where_the_registers_end(joined: list[tuple[Pipeline, ...]]) -> None:
    check(mlp(8), inputs(ROWS, 64))
    (parts,) = joined
    first, second = (builds(p)[0].chain for p in parts)
    assert [len(first.layers), len(second.layers)] == [5, 4] and second.gradient == first.result == "between0"


def test_narrow_layers_are_not_cut_to_save_memory(
    joined: list[tuple[Pipeline, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a backward chain makes never is in memory."""
    monkeypatch.setattr(kept, "SMALL_BYTES", 0)
    check(mlp(5), inputs(ROWS, 64))
    assert [len(parts) for parts in joined] == [2]


def test_what_is_no_chain_stays_apart(joined: list[tuple[Pipeline, ...]]) -> None:
    check(mlp(2, 136), inputs(ROWS, 136))  # wider than both warpgroups' sums
    assert joined == []


def test_two_layers_wider_than_64_share_a_launch(joined: list[tuple[Pipeline, ...]]) -> None:
    """Both warpgroups share the sums, of two layers and of a narrow one besides; four are cut evenly."""
    check(mlp(3, 72), inputs(100, 72))
    (parts,) = joined
    made = [builds(p)[0] for p in parts]
    assert all(s.layout.kind is Kind.WIDE for s in made) and [len(s.chain.layers) for s in made] == [2, 2]


@pytest.mark.parametrize("slope", [nn.GELU, nn.SiLU, nn.ELU, nn.Hardswish])
@pytest.mark.every(2)
def test_inputs_that_were_not_saved_are_made_again(
    slope: Callable[[], nn.Module], joined: list[tuple[Pipeline, ...]]
) -> None:
    """The activation's derivative and its result, for dW, are both of what it was taken of."""
    check(mlp(2, 32, slope=slope), inputs(ROWS, 32))
    ((chain,),) = joined
    assert [bool(x.makes) for x in builds(chain)[0].chain.layers] == [True, True, False]


def normed(width: int, ins: int, slope: Callable[[], nn.Module] = nn.ReLU) -> nn.Sequential:
    """An MLP that ends with a norm, as those of MeshGraphNets do."""
    torch.manual_seed(0)
    parts = [nn.Linear(ins, width), slope(), nn.Linear(width, width), slope(), nn.Linear(width, width)]
    return nn.Sequential(*parts, nn.LayerNorm(width)).half()


@pytest.mark.parametrize(("width", "slope"), [(64, nn.ReLU), (128, nn.ReLU), (32, nn.GELU)])
def test_a_chain_begins_behind_the_derivative_of_a_norm(
    width: int, slope: Callable[[], nn.Module], joined: list[tuple[Pipeline, ...]]
) -> None:
    """Which is Inductor's: it leaves the dY that sums and chain read. Inputs that were not saved are the chain's."""
    check(normed(width, width, slope), inputs(ROWS, width))
    (parts,) = joined
    layers = [x for p in parts for x in builds(p)[0].chain.layers]
    assert [(x.out, x.k) for x in layers] == [(width, width)] * 3
    assert [bool(x.makes) for x in layers] == [slope is nn.GELU] * 2 + [False]


def test_an_mlp_that_is_no_chain_stays_whole(joined: list[tuple[Pipeline, ...]]) -> None:
    """A first layer of 136 inputs: the norm's derivative stays in its region, which makes all of dX."""
    before = len(prepare.analyses())
    check(normed(64, 136), inputs(ROWS, 136))
    assert joined == []
    (backward,) = [a for a in prepare.analyses()[before:] if "aten.threshold_backward.default" in a.operators]
    assert "aten.mean.dim" in backward.operators and backward.operators.count("aten.mm.default") == 3


def test_blocks_of_messages(joined: list[tuple[Pipeline, ...]], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What edges of MeshGraphNets give back is a chain behind each norm. Its launches are cut where the first layer's
    dY is, which nodes sum; dX has the residual added."""
    monkeypatch.setattr(inductor, "compile_inner", eagerly)
    sizes = {"nodes": 60, "edges": 300, "steps": 3}
    module, given = MODELS["mgn"].make(device="cpu", training=True, **sizes)
    compiled = torch.compile(module, backend="tilestream", options={"target": "reference"})
    wide = copy.deepcopy(module).double()

    def all_gradients(function: Any, own: nn.Module, *inputs: Tensor) -> Tensor:
        own.zero_grad()
        function(*inputs).double().square().mean().backward()
        return torch.cat([p.grad.double().flatten() for p in own.parameters() if p.grad is not None])

    got, eager = (all_gradients(function, module, *given) for function in (compiled, module))
    exact = all_gradients(wide, wide, *(x.double() if x.is_floating_point() else x for x in given))
    assert oracle.error(got, exact) <= 2 * oracle.error(eager, exact)
    assert len(joined) == 3 + 1, "of each block's edges, and of the layers that embed them"
    added = [parts for parts in joined if any(op.kind == "add" for op in parts[-1].stages[0].ops)]
    assert added
    for parts in added:
        first, second = (builds(p)[0].chain for p in parts)
        assert [len(first.layers), len(second.layers)] == [2, 1] and first.result == second.gradient
        assert all(x.bias_gradient for x in (*first.layers, *second.layers))
    if shutil.which("g++") is not None:
        _same_on_the_host(added[0][-1], folder)


def _same_on_the_host(p: Pipeline, folder: Path) -> None:
    """The kernel of a chain computes what the reference machine does."""
    torch.manual_seed(0)
    inputs = {
        t.name: torch.randn([n or ROWS for n in (a.size for a in t.axes)]).to(TORCH_DTYPES[t.dtype])
        for t in p.tensors
        if t.role is not Role.OUTPUT
    }
    got, want = run_on_host(p, inputs, HostRun(folder=folder)), reference.run(p, inputs)
    assert got.keys() == want.keys()
    for name in want:
        torch.testing.assert_close(got[name].double(), want[name].double(), rtol=2**-7, atol=0.1)
