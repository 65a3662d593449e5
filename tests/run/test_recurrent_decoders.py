"""A recurrent decoder, whose states are buffers that each call changes in place."""

from __future__ import annotations

import copy

import pytest
import torch
from one_rows import recurrent

from benchmarks.lib.recurrent_decoders import RecurrentDecoder
from tilestream.devices import get
from tilestream.graph.capture import capture
from tilestream.options import Options
from tilestream.plan.find import find
from tilestream.run import around, oracle
from tilestream.run.backend import tilestream
from tilestream.run.made_up import random_arguments

IDS = [torch.tensor([n]) for n in (3, 7, 1)]


def small() -> RecurrentDecoder:
    torch.manual_seed(0)
    return RecurrentDecoder(layers=2, width=64, hidden=128, vocabulary=40).bfloat16().eval()


@torch.no_grad()
def test_the_recurrence_is_its_weighted_mean() -> None:
    """Behind three tokens: a mean of values, weighted by exponentials of keys and of how long they are ago."""
    mixing = small().double().blocks[0].time
    rows = torch.randn(3, 1, 64, dtype=torch.double)
    got = [mixing(x) for x in rows]
    mixes, keys, values = list(mixing.mixes), [], []
    for t, x in enumerate(rows):
        r, k, v = (x * m + (rows[t - 1] if t else torch.zeros_like(x)) * (1 - m) for m in mixes)
        ago = [mixing.first, *(-torch.exp(mixing.decay) * n for n in range(t))][: t + 1]
        keys.append(mixing.key(k))
        values.append(mixing.value(v))
        weights = torch.stack([torch.exp(a + key) for a, key in zip(ago, reversed(keys), strict=True)])
        mean = (weights * torch.stack(values[::-1])).sum(0) / weights.sum(0)
        want = mixing.output(torch.sigmoid(mixing.receptance(r)) * mean)
        torch.testing.assert_close(got[t], want, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("without_inductor")
@torch.no_grad()
def test_tokens_and_states_are_as_eagers() -> None:
    model = small()
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    compiled = torch.compile(model, backend=tilestream, options={"target": "reference"})
    for ids in IDS:
        want, plain, got = exact(ids), eager(ids), compiled(ids)
        assert (got - want).norm() <= 2 * (plain - want).norm() + 1e-3 * want.norm()
    for (name, mine), theirs in zip(model.named_buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0.1, atol=0.1, msg=name)


@torch.no_grad()
def test_another_recurrence_and_its_states_are_as_eagers(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of its kernels but the first load weights while the one in front runs: none of them writes states."""
    early: list[int] = []
    start_early = around.start_early
    monkeypatch.setattr(around, "start_early", lambda *given: early.append(start_early(*given)))
    torch.manual_seed(1)
    model = recurrent(64, 96)
    exact, eager = copy.deepcopy(model).double(), copy.deepcopy(model)
    compiled = torch.compile(model, backend=tilestream, options={"target": "reference"})
    for row in torch.randn(4, 1, 64, dtype=torch.bfloat16):
        want, plain, got = exact(row.double()), eager(row), compiled(row)
        assert (got - want).norm() <= 2 * (plain - want).norm() + 1e-3 * want.norm()
    for mine, theirs in zip(model.buffers(), exact.buffers(), strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=0.05, atol=0.05)
    assert early == [3]


def test_made_up_sums_of_weights_are_not_near_zero() -> None:
    """What is timed is held to float64: of quotients of sums of both signs eager itself is far from it."""
    torch.manual_seed(0)
    model = RecurrentDecoder(layers=2, width=768, hidden=768, vocabulary=40).bfloat16().eval()
    (graph,) = capture(model, IDS[:1]).graphs
    regions = find(graph, "inference", Options(device="h200", target="reference"), get("h200")).regions
    assert any(op.kind == "div" for r in regions for op in r.program.stages[0].ops)
    for region in regions:
        values = random_arguments(region)
        made, exact = region.graph(*values), oracle.in_float64(region.graph, values)
        assert all(oracle.error(mine, right) < 0.02 for mine, right in zip(made, exact, strict=True))
