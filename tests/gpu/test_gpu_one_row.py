"""Launches of one row on the GPU: values and bits of kernels; recurrent decoders and their states, step by step."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from one_rows import cell, columns_of_one, layer, recurrent
from oracle_runs import assert_close, assert_same_bits, reference_run, run_poisoned, to_gpu
from random_pipelines import tensors_for
from replays import check_replays
from torch import Tensor, nn

from benchmarks.lib.recurrent_decoders import RecurrentDecoder
from tilestream import cuda
from tilestream.devices import get
from tilestream.plan.few_rows import ONE_ROW
from tilestream.plan.passes.divide_columns import divide_columns
from tilestream.run import prepare
from tilestream.run.backend import tilestream

pytestmark = pytest.mark.gpu

CASES = {
    "a cell": cell(),
    "a wide cell of f16": cell(768, 3072, "f16"),
    "columns of one": columns_of_one(),
    "more pieces than a lane loads at once": layer(3336, 768),
    "jobs by turns": layer(768, 50_277),
}
OPTIONS = {"strategy": "shared", "effort": "model"}
"""Nothing is timed: all launches are those of one row, whatever else would be as fast."""


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("name", CASES)
def test_values_and_bits(name: str, rows: int) -> None:
    pipeline = divide_columns(CASES[name], get("h200"))
    compiled, tensors = cuda.build(pipeline), tensors_for(pipeline, rows)
    given = to_gpu(tensors)
    got = run_poisoned(compiled, given, rows)
    assert_close(pipeline, got, *reference_run(pipeline, tensors))
    for _ in range(20):  # back to back: a launch loads its weights while the one in front runs
        last = compiled(given, rows)
    assert_same_bits(got, {name: t.cpu() for name, t in last.items()})


def test_replays_give_the_same_bits() -> None:
    pipeline = divide_columns(cell(), get("h200"))
    compiled, given = cuda.build(pipeline), to_gpu(tensors_for(pipeline, 1))
    check_replays(compiled, given, 1, {name: torch.empty_like(t) for name, t in compiled(given, 1).items()})


def rwkv() -> tuple[nn.Module, list[Tensor]]:
    model = RecurrentDecoder(layers=2, width=256, hidden=1024, vocabulary=1000).bfloat16().eval()
    return model.cuda(), [torch.tensor([n], device="cuda") for n in (3, 700, 1, 1, 52, 999)]


def gated() -> tuple[nn.Module, list[Tensor]]:
    return recurrent(256, 384).cuda(), list(torch.randn(6, 1, 256, device="cuda", dtype=torch.bfloat16))


MODELS = {"RWKV": rwkv, "another recurrence": gated}


class Steps:
    """A model, compiled, and its states as they were before the first step."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.model, self.inputs = MODELS[name]()
        self.states = list(self.model.buffers())
        self.before = [state.clone() for state in self.states]
        self.compiled = torch.compile(self.model, backend=tilestream, options=OPTIONS)

    def reset(self) -> None:
        for state, before in zip(self.states, self.before, strict=True):
            state.copy_(before)

    def run(self) -> list[Tensor]:
        """The results of all steps, then the states behind them."""
        self.reset()
        return [*(self.compiled(x).clone() for x in self.inputs), *(state.clone() for state in self.states)]


def steps_of(model: nn.Module, inputs: Sequence[Tensor]) -> list[Tensor]:
    return [*(model(x) for x in inputs), *model.buffers()]


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_steps_and_states_are_as_eagers(name: str, fresh: None) -> None:
    steps = Steps(name)
    exact, eager = copy.deepcopy(steps.model).double(), copy.deepcopy(steps.model)
    got, again = steps.run(), steps.run()
    assert all(map(torch.equal, got, again))
    plans = [a.plan for a in prepare.analyses()]
    assert plans and all(plan is not None and plan.chosen.detail == ONE_ROW for plan in plans)
    wide = [x.double() if x.is_floating_point() else x for x in steps.inputs]
    for mine, theirs, want in zip(got, steps_of(eager, steps.inputs), steps_of(exact, wide), strict=True):
        assert (mine - want).norm() <= 2 * (theirs - want).norm() + 2e-3 * want.norm()


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_replays_of_a_graph_are_steps(name: str, fresh: None) -> None:
    """States are read where they are and changed by each replay; the capture itself changes nothing."""
    steps = Steps(name)
    want = steps.run()
    steps.reset()
    given, graph = steps.inputs[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = steps.compiled(given)
    for _ in range(20):
        steps.reset()
        got: list[Tensor] = []
        for x in steps.inputs:
            given.copy_(x)
            out.fill_(float("nan"))
            graph.replay()
            got.append(out.clone())
        assert all(map(torch.equal, [*got, *steps.states], want))
