"""The five applications through ``torch.compile``, at small sizes on the reference machine: results and gradients."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from streamed import eagerly
from test_backend import compiled
from test_kitsune_apps import SMALL
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tilestream.apps.models import MODELS
from tilestream.run import fallback, inductor, oracle, prepare

APPS = ("nerf", "dlrm", "mgn", "graphcast_small", "llama_prefill+sdpa")


@pytest.fixture(autouse=True)
def _quick(fresh: None, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(inductor, "_compiled", eagerly)
    monkeypatch.setattr(fallback, "whole", lambda graph, *_: graph.forward)


def gradients(function: Any, module: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    """All gradients of the sum of squares of the results, as one vector."""
    module.zero_grad(set_to_none=True)
    results = [y for y in pytree.tree_leaves(function(*inputs)) if y.is_floating_point()]
    torch.stack([y.double().square().mean() for y in results]).sum().backward()
    return torch.cat([p.grad.double().flatten() for p in module.parameters() if p.grad is not None])


@pytest.mark.parametrize("name", APPS)
def test_gradients_are_as_near_to_float64_as_eagers(name: str):
    module, inputs = MODELS[name].make(device="cpu", training=True, **SMALL[name])
    got = gradients(compiled(module), module, inputs)
    eager = gradients(module, module, inputs)
    wide = copy.deepcopy(module).double()
    exact = gradients(wide, wide, tuple(x.double() if x.is_floating_point() else x for x in inputs))
    error, own = oracle.error(got, exact), oracle.error(eager, exact)
    assert error <= 2 * own, f"error {error:.2e}, eager's {own:.2e}"
    assert prepare.analyses()


@pytest.mark.parametrize("name", APPS)
def test_results_are_as_near_to_float64_as_eagers(name: str):
    module, inputs = MODELS[name].make(device="cpu", **SMALL[name])
    with torch.no_grad():
        got, eager = (pytree.tree_leaves(f(*inputs)) for f in (compiled(module), module))
        wide = copy.deepcopy(module).double()
        exact = pytree.tree_leaves(wide(*[x.double() if x.is_floating_point() else x for x in inputs]))
    error, own, good = oracle.judge(got, eager, exact)
    assert good, f"error {error:.2e}, eager's {own:.2e}"
