"""Kernels that start before the one in front of them has ended: only behind a kernel of the same graph, and only where
nobody writes their weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from test_constant_weights import region_of, values_of
from torch import Tensor, fx, nn

from tilestream.ir.pipeline import Pipeline
from tilestream.options import Options
from tilestream.reference.whole import run_whole
from tilestream.run import around, early_launches
from tilestream.run.backend import tilestream
from tilestream.run.call import RegionCall
from tilestream.run.executable import Interpreted
from tilestream.run.operator import REGION
from tilestream.run.spec import decode, encode, spec_of

ON = Options()
OPTIONS: dict[str, Any] = {"target": "reference", "strategy": "shared"}


class Ffn(nn.Module):
    """[rows, 48] to [rows, 48] through a hidden layer that is wider than a row stream holds."""

    def __init__(self, hidden: int = 520) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(48, hidden), nn.Linear(hidden, 48)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.relu(self.up(x)))


class Two(nn.Module):
    """Two blocks, and what stands between them."""

    def __init__(self, between: Any, hidden: int = 520) -> None:
        super().__init__()
        self.first, self.second, self.between = Ffn(hidden), Ffn(hidden), between

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.between(self, self.first(x)))


def early(
    monkeypatch: pytest.MonkeyPatch, module: nn.Module, options: Options = ON, strategy: str = "shared"
) -> list[bool]:
    """Which of a module's regions start early, in order, with the values as they should be."""
    seen: list[bool] = []

    def start_early(graph: fx.GraphModule, _: Options) -> int:
        made = starts(graph, options)
        calls = graph.graph.find_nodes(op="call_function", target=REGION)
        seen.extend(decode(str(node.args[2])).early for node in calls)
        assert made == sum(seen)
        return made

    starts = early_launches.start_early
    monkeypatch.setattr(around, "start_early", start_early)
    torch._dynamo.reset()
    x = torch.randn(16, 48).bfloat16()
    module = module.bfloat16().eval()
    with torch.no_grad():
        got = torch.compile(module, backend=tilestream, options=OPTIONS | {"strategy": strategy})(x)
        torch.testing.assert_close(got, module(x), rtol=0.1, atol=0.1)
    return seen


def test_the_second_kernel_of_a_graph_starts_early(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    assert early(monkeypatch, Two(lambda m, x: x.cumsum(-1))) == [False, True]


def test_so_does_a_row_stream(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    two = Two(lambda m, x: x.cumsum(-1), hidden=96)
    assert early(monkeypatch, two, strategy="vertical") == [False, True]


def test_none_does_where_it_is_off(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    assert early(monkeypatch, Two(lambda m, x: x.cumsum(-1)), Options(early_launch=False)) == [False, False]


def test_none_does_beside_kernels_of_inductor_that_do(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    monkeypatch.setitem(OPTIONS, "triton.enable_pdl", True)
    assert early(monkeypatch, Two(lambda m, x: x.cumsum(-1))) == [False, False]


def test_none_does_whose_weights_the_graph_writes(monkeypatch: pytest.MonkeyPatch, fresh: None) -> None:
    def write(m: nn.Module, x: Tensor) -> Tensor:
        m.second.up.weight.mul_(1.0)  # pyright: ignore
        return x.cumsum(-1)

    assert early(monkeypatch, Two(write)) == [False, False]


@pytest.mark.parametrize("lies", ["by rows", "transposed"])
def test_a_weight_that_a_launch_in_front_copies_is_written(lies: str, monkeypatch: pytest.MonkeyPatch) -> None:
    region = replace(region_of(48, 520, 3), device=torch.device("cpu"))  # both weights [in, out], as GPT-2 has them
    weights = [p for p in region.parameters if ("t",) in p.steps]
    asked: list[bool] = []

    def built(pipeline: Pipeline, kind: str, device: torch.device, early: bool = False) -> Interpreted:
        asked.append(early)
        return Interpreted(pipeline, run_whole)

    monkeypatch.setattr("tilestream.run.call.executable", built)
    values = values_of(region)
    if lies == "by rows":
        for p in weights:  # the same sizes and other strides: as if the model had transposed them before
            values[p.index] = values[p.index].t().contiguous().t()
    for wanted in (False, True):
        spec = replace(spec_of(region, region.program, "cuda"), early=wanted)
        call = RegionCall(decode(encode(spec)), torch.device("cpu"), rescue=False)
        call(values)
        assert asked.pop() is (wanted and lies == "by rows")
