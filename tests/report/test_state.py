"""``explain``, ``simulate`` and ``check`` leave a model, its inputs and the random numbers as they were."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import tilestream
from tilestream.bench.accuracy import Oracle
from tilestream.errors import CaptureError
from tilestream.graph.state import State, preserved


class Cache:
    """What a caller of a language model hands in: an object with layers of tensors, which the model fills."""

    def __init__(self) -> None:
        self.layers = [torch.zeros(2)]
        self.seen = 0


class Branching(nn.Module):
    """Branches on a value, so that it has to be run; changes all that a model can change."""

    def __init__(self, fails: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(8, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(), nn.Linear(64, 1))
        self.inner = nn.Linear(8, 8).eval()
        self.history: list[float] = []
        self.calls = 0
        self.fails = fails

    def forward(self, x: Tensor, past: Cache | None = None) -> Tensor:
        if bool((x.sum() > -1e9).item()):
            self.calls += 1
            self.history.append(random.random() + np.random.rand())
            self.train(not self.training)
        y = self.net.train()(x) + torch.rand(len(x), 1)
        if not torch.is_grad_enabled():
            with torch.enable_grad():
                self.inner(x.detach()).sum().backward()
            self.inner.weight.mul_(0.5)
            x.mul_(2)
        if past is not None:
            past.seen += 1
            past.layers[0].add_(1)
            past.layers.append(y)
        if self.fails:
            raise ValueError("on purpose")
        return y


def snapshot(model: Any, x: Tensor, cache: Cache) -> list[Any]:
    modules = list(model.modules()) if isinstance(model, nn.Module) else []
    return [
        copy.deepcopy({**dict(model.named_parameters()), **dict(model.named_buffers())}) if modules else {},
        [None if p.grad is None else p.grad.clone() for m in modules for p in m.parameters(recurse=False)],
        [m.training for m in modules],
        [(m.calls, list(m.history)) for m in modules if isinstance(m, Branching)],
        (x.clone(), cache.seen, len(cache.layers), cache.layers[0].clone()),
        (torch.get_rng_state(), random.getstate(), np.random.get_state()[1].copy()),  # pyright: ignore[reportCallIssue, reportArgumentType]
    ]


def equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return bool((a == b).all())
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(equal, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    return bool(a == b)


@pytest.mark.parametrize("call", [tilestream.explain, tilestream.simulate])
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.every(2)
def test_a_model_that_has_to_be_run_is_left_as_it_was(call: Callable[..., Any], fails: bool) -> None:
    model, x, cache = Branching(fails), torch.randn(16, 8), Cache()
    if fails:  # gradients from before stay, and none come
        model.inner(x).sum().backward()
    before = snapshot(model, x, cache)
    if fails:
        with pytest.raises(CaptureError, match="on purpose"):
            call(model, x, past=cache)
    else:
        call(model, x, past=cache)
    assert equal(snapshot(model, x, cache), before)


def test_the_check_of_results_uses_the_same_and_leaves_all_as_it_was() -> None:
    model, x, cache = Branching(), torch.randn(16, 8), Cache()
    before = snapshot(model, x, cache)
    Oracle(model, (x,), {"past": cache})
    assert equal(snapshot(model, x, cache), before)


def test_a_function_restores_the_modules_it_closes_over() -> None:
    model, x, cache = Branching(), torch.randn(16, 8), Cache()
    before = snapshot(model, x, cache)
    tilestream.explain(lambda x: model(x), x)
    tilestream.explain(model.forward, x)
    assert equal(snapshot(model, x, cache), before)


def test_a_training_step_that_has_to_be_run_leaves_no_gradients() -> None:
    model, x, cache = Branching(), torch.randn(16, 8), Cache()
    before = snapshot(model, x, cache)
    tilestream.explain(model, x, training=True)
    assert equal(snapshot(model, x, cache), before)


def test_generators_of_every_gpu_are_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    states = [[torch.tensor([1])], []]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_rng_state_all", lambda: states[0])
    monkeypatch.setattr(torch.cuda, "set_rng_state_all", states[1].append)
    with preserved(nn.Identity()):
        pass
    assert states[1] == [states[0]]


def test_memory_that_nothing_wrote_to_is_not_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights may be a file that is mapped for reading alone."""
    state = State(nn.Linear(3, 3))

    def refuse(*_: object) -> None:
        raise AssertionError("written")

    monkeypatch.setattr(torch.UntypedStorage, "copy_", refuse)
    state.restore()


def test_lazy_layers_stay_lazy() -> None:
    model = nn.Sequential(nn.LazyLinear(64), nn.ReLU(), nn.LazyLinear(1))
    tilestream.explain(model, torch.randn(4, 8))
    assert isinstance(model[0], nn.LazyLinear) and nn.parameter.is_lazy(model[0].weight)
    assert model(torch.randn(3, 5)).shape == (3, 1) and type(model[0]) is nn.Linear and model[0].in_features == 5
