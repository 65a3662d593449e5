"""The five applications through ``torch.compile``, at small sizes on the reference machine: results and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from on_reference import compiled
from small_sizes import SMALL
from streamed import eagerly
from test_messages_training import sorted_sums
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from tilestream.apps.models import MODELS
from tilestream.plan import messages
from tilestream.run import fallback, inductor, oracle, prepare

APPS = ("nerf", "dlrm", "mgn", "graphcast_small", "llama_prefill+sdpa")


SORTED = {"mgn": [(2, 2), (0, 4)], "graphcast_small": [(5, 4), (1, 8)]}
"""Sorts and sums of messages in the forward and the backward graph."""


@pytest.fixture(autouse=True)
def graphs(fresh: None, monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """What Inductor would compile. Small sums of messages pay, too."""
    seen: list[fx.GraphModule] = []

    def kept(graph: fx.GraphModule, inputs: Any, kwargs: Any) -> Any:
        seen.append(graph)
        return eagerly(graph, inputs, kwargs)

    monkeypatch.setattr(inductor, "compile_inner", kept)
    monkeypatch.setattr(fallback, "whole", lambda graph, *_: graph.forward)
    monkeypatch.setattr(messages, "atomics_us", lambda _: 1e9)
    return seen


def gradients(function: Any, module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """All gradients of the sum of squares of the results, as one vector."""
    module.zero_grad(set_to_none=True)
    results = [y for y in pytree.tree_leaves(function(*inputs)) if y.is_floating_point()]
    torch.stack([y.double().square().mean() for y in results]).sum().backward()
    return torch.cat([p.grad.double().flatten() for p in module.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", APPS)
@pytest.mark.every(2)
def test_gradients_are_as_near_to_float64_as_eagers(name: str, graphs: list[fx.GraphModule]):
    module, inputs = MODELS[name].make(device="cpu", training=True, **SMALL[name])
    got = gradients(compiled(module), module, inputs)
    eager = gradients(module, module, inputs)
    wide = copy.deepcopy(module).double()
    exact = gradients(wide, wide, tuple(x.double() if x.is_floating_point() else x for x in inputs))
    error, own = oracle.error(got, exact), oracle.error(eager, exact)
    assert error <= 2 * own, f"error {error:.2e}, eager's {own:.2e}"
    assert prepare.analyses()
    assert name not in SORTED or [sorted_sums(graph) for graph in graphs] == SORTED[name]


@pytest.mark.parametrize("name", APPS)
@pytest.mark.every(2)
def test_results_are_as_near_to_float64_as_eagers(name: str):
    module, inputs = MODELS[name].make(device="cpu", **SMALL[name])
    with torch.no_grad():
        got, eager = (pytree.tree_leaves(f(*inputs)) for f in (compiled(module), module))
        wide = copy.deepcopy(module).double()
        exact = pytree.tree_leaves(wide(*[x.double() if x.is_floating_point() else x for x in inputs]))
    error, own, good = oracle.judge(got, eager, exact)
    assert good, f"error {error:.2e}, eager's {own:.2e}"
