"""Backward chains in ``explain``: those that a compilation makes, with their kernels and one prediction."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from test_joined_chains import check, inputs, joined, mlp
from torch import Tensor, nn

from tilestream.apps.nerf import NeRF
from tilestream.devices import get
from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.gradients.cost import cost
from tilestream.options import Options
from tilestream.plan import chain_choice, chooser
from tilestream.plan.analyse import analyse
from tilestream.plan.analysis import Analysis
from tilestream.plan.backward_chains import STRATEGY, Joined
from tilestream.plan.candidates import FALLBACK
from tilestream.plan.parts import RegionAnalysis
from tilestream.report import html, kernels, parts
from tilestream.report.explain import Report
from tilestream.report.simulation import Simulation

__all__ = ["joined"]  # a fixture
H200 = get("h200")
ROWS = 262_144


def told(model: nn.Module, *given: Tensor, **options: object) -> Analysis:
    return analyse(copy.deepcopy(model), given, Options().with_(**options), H200, training=True)


def chains(a: Analysis) -> list[RegionAnalysis]:
    return [r for r in a.regions if r.kind == "backward chain"]


def step(hidden: int = 2, width: int = 64, **options: object) -> Analysis:
    """A training step of an MLP, of which nothing is computed."""
    x = torch.empty(ROWS, width, dtype=torch.float16, device="meta", requires_grad=True)
    return told(mlp(hidden, width).to("meta"), x, **{"cache": False, **options})


@cache
def narrow() -> Analysis:
    return step()


@pytest.mark.parametrize(
    ("model", "x", "count"),
    [
        (lambda: mlp(2), (200, 64), 1),
        (lambda: mlp(8), (200, 64), 2),
        (lambda: mlp(3, 72), (100, 72), 2),
        (lambda: mlp(2, 32, bias=True), (10, 20, 32), 1),
        (lambda: mlp(2, 32, slope=nn.GELU), (200, 32), 1),
        (lambda: mlp(2, 136), (200, 136), 0),
    ],
    ids=["one launch", "two", "both warpgroups' sums", "biases", "inputs made again", "too wide"],
)
@pytest.mark.every(2)
def test_what_is_told_is_what_a_compilation_makes(
    model: Callable[[], nn.Module], x: tuple[int, ...], count: int, joined: list[tuple[Pipeline, ...]]
) -> None:
    """The same launches, tensor by tensor: what was timed of one is known to the other."""
    given = inputs(*x)
    check(model(), given)
    assert [r.launches for r in chains(told(model(), given, target="reference"))] == joined
    assert [len(launches) for launches in joined] == [count] * bool(count)


def test_nerfs_step_has_none(joined: list[tuple[Pipeline, ...]]) -> None:
    """Its layers are joined by concatenations and two heads, and so is its backward pass, however narrow."""
    torch.manual_seed(0)
    model = NeRF(depth=2, width=32, points=32, views=16, skip=0).half()
    given = [torch.randn(70, n).half() for n in (32, 16)]
    torch.compiler.reset()
    torch.compile(model, backend="tilestream", options={"target": "reference"})(*given).sum().backward()
    made = told(model, *given, target="reference")
    assert joined == [] and not chains(made)
    assert {"region", "weight gradients"} == {r.kind for r in made.regions if r.graph == 1}


def test_a_chain_stands_for_its_region_and_its_sums() -> None:
    a = narrow()
    (chain,) = chains(a)
    assert [r.kind for r in a.regions] == ["region", "backward chain"]
    assert chain.name == "graph1.region0+gradients0" and len(chain.operators) == 6 + 2
    assert a.coverage.dataflow.operators == a.coverage.whole.operators
    text = str(Report(a))
    assert "in 1 region and 1 backward chain; Inductor: none" in text
    assert "apart: graph1.region0 and graph1.gradients0" in text


@pytest.mark.parametrize(("hidden", "launches"), [(2, 1), (8, 2)])
def test_there_is_one_prediction_of_it(hidden: int, launches: int) -> None:
    """The cost model of chains, of all launches, in the text, the JSON, by part and in ``simulate``."""
    a = step(hidden)
    (chain,) = chains(a)
    us = sum(cost(p, ROWS, H200).seconds for p in chain.launches) * 1e6
    data = Report(a).json()
    (launch,) = [x for x in data["launches"] if x["what"] == "backward chain"]
    (part,) = [x for x in data["parts"] if x["part"] == "backward chains"]
    (region,) = [x for x in data["regions"] if x["kind"] == "backward chain"]
    assert launch["predicted_us"] == part["predicted_us"] == region["chosen"]["predicted_us"] == pytest.approx(us)
    assert launch["kernels"] == len(region["chosen"]["pipeline"]["launches"]) == launches
    assert sum(x["predicted_us"] for x in data["launches"]) == pytest.approx(data["predicted_us"])
    assert Simulation.of(a).whole_us["auto"] == pytest.approx(data["predicted_us"])
    assert sum(p.predicted_us for p in parts.parts(a)) == pytest.approx(data["predicted_us"])


def test_its_parts_apart_are_what_it_would_replace() -> None:
    """Predicted as they are told where they do not join; and by other strategies they are not joined."""
    a, apart = narrow(), step(measure=False)
    (chain,) = chains(a)
    assert chain.plan is not None
    two = [apart.candidate_us(r, r.plan.chosen) for r in apart.regions if r.graph == 1 and r.plan is not None]
    assert len(two) == 2 and None not in two
    assert a.candidate_us(chain, chain.plan.candidates[1]) == pytest.approx(sum(us or 0.0 for us in two))
    assert Simulation.of(a).whole_us["vertical"] > a.predicted_us  # pyright: ignore[reportOperatorIssue]


def test_its_kernels_are_shown(tmp_path: Path) -> None:
    """Every launch's source; so are those of sums, and the page has both."""
    text = kernels.text(step(8))
    names = ("tilestream_chain0", "tilestream_chain1")
    assert all(f"backward chain, launch {k}: {name}" in text for k, name in enumerate(names))
    assert all(f"{name}(" in text for name in names)
    assert "stationary, launch 0: tilestream_gradients" in kernels.text(step(measure=False))
    html.write(tmp_path / "page.html", Report(narrow()), html.Content(simulations={}))
    assert "graph1.region0+gradients0" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("rows", "said"), [(128, "shared"), (65_536, "vertical (wide layers as tiles over the grid)")], ids=["few", "many"]
)
def test_kernels_of_blocks_are_shown(rows: int, said: str) -> None:
    x = torch.empty(rows, 768, dtype=torch.bfloat16, device="meta")
    block = nn.Sequential(nn.Linear(768, 3072), nn.GELU(), nn.Linear(3072, 768)).bfloat16().to("meta")
    made = analyse(block.requires_grad_(False), (x,), Options(cache=False), H200)
    text = kernels.text(made)
    assert text.startswith(f"// region0, {said}") and "tilestream_region(" in text


@pytest.mark.parametrize("options", [{"measure": False}, {"strategy": "vertical"}], ids=str)
def test_where_nothing_is_timed_a_gpu_runs_none(options: dict[str, object]) -> None:
    """As a compilation has it: without times, and where a strategy is forced, they stay apart."""
    assert not chains(step(**options))


def test_odd_rows_may_be_joined() -> None:
    """Rows that bulk copies cannot address are timed both ways, as others are."""
    x = torch.empty(ROWS, 27, dtype=torch.float16, device="meta")
    model = nn.Sequential(nn.Linear(27, 64), nn.ReLU(), nn.Linear(64, 3)).half().to("meta")
    assert chains(told(model, x, cache=False))


@pytest.mark.parametrize(("ours_us", "apart_us", "joins"), [(40.0, 90.0, True), (90.0, 89.0, False)])
def test_a_choice_that_was_timed_counts(tmp_path: Path, ours_us: float, apart_us: float, joins: bool) -> None:
    """It is kept under the launches themselves, by the compilation that timed it."""
    (chain,) = chains(narrow())
    joint = Joined(chain.launches, (), ())
    asked = chain_choice.question(joint, ROWS, H200, timed=True, forced=False)
    times = {STRATEGY: ours_us, FALLBACK: apart_us}
    chooser.choose(asked, Options(cache_dir=tmp_path), lambda candidates: [times[c.strategy] for c in candidates])
    chooser.forget()
    found = chains(step(cache=True, cache_dir=tmp_path))
    assert len(found) == joins
    for r in found:
        assert r.plan is not None and r.plan.chosen.strategy == STRATEGY and r.plan.chosen.measured_us == ours_us
