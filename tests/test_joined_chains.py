"""Regions joined with the sums of their gradients: which are, into how many launches, and what gradients they give."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tilestream.graph import kept
from tilestream.ir.pipeline import Pipeline
from tilestream.run import backward_chains
from tilestream.schedule.backward import WideChain, build

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
    place = backward_chains._place

    def note(graph: Any, pair: Any, kind: str) -> None:
        found.append(pair.joined.pipelines)
        place(graph, pair, kind)

    monkeypatch.setattr(backward_chains, "_place", note)
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
    found = build(chain).chain
    assert [(x.out, x.k) for x in found.layers] == [(16, 64), (64, 64), (64, 64)] and found.result


def test_biases_other_widths_no_dx_and_leading_dimensions(joined: list[tuple[Pipeline, ...]]) -> None:
    check(mlp(2, 32, bias=True), inputs(10, 20, 32, wants_gradient=False))
    ((chain,),) = joined
    found = build(chain).chain
    assert not found.result and all(layer.bias_gradient for layer in found.layers)


def test_gradients_of_widths_that_bulk_copies_cannot_address(joined: list[tuple[Pipeline, ...]]) -> None:
    """Three colours: the sums took them with columns of zeros, a chain reads them as they are."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(27, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)).half()
    check(module, inputs(ROWS, 27, wants_gradient=False))
    ((chain,),) = joined
    assert build(chain).odd and build(chain).chain.layers[0].out == 3


def test_a_long_chain_is_cut_where_the_registers_end(joined: list[tuple[Pipeline, ...]]) -> None:
    check(mlp(8), inputs(ROWS, 64))
    (parts,) = joined
    first, second = (build(p).chain for p in parts)
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
    made = [build(p) for p in parts]
    assert all(isinstance(s, WideChain) for s in made) and [len(s.chain.layers) for s in made] == [2, 2]


@pytest.mark.parametrize("slope", [nn.GELU, nn.SiLU, nn.ELU, nn.Hardswish])
def test_inputs_that_were_not_saved_are_made_again(
    slope: Callable[[], nn.Module], joined: list[tuple[Pipeline, ...]]
) -> None:
    """The activation's derivative and its result, for dW, are both of what it was taken of."""
    check(mlp(2, 32, slope=slope), inputs(ROWS, 32))
    ((chain,),) = joined
    assert [bool(x.makes) for x in build(chain).chain.layers] == [True, True, False]
