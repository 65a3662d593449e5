"""Timelines begin at 0: no slice of any app's, whole model's or training step's timeline lies before it."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
import torch
from graph_layers import LAYERS
from ragged_cases import CASES

import tilestream
from tilestream.apps import APPS
from tilestream.apps.load import load
from tilestream.apps.models import MODELS
from tilestream.bench import analysed
from tilestream.devices import get
from tilestream.options import Options
from tilestream.plan import messages
from tilestream.report import timeline
from tilestream.report.charts import LEFT, gantt
from tilestream.report.explain import Report
from tilestream.report.simulation import Run, Simulation
from tilestream.report.timeline import by_worker, waits
from tilestream.simulator import simulate


def before_zero(name: str, rows: int | None = None, training: bool = False) -> list[dict[str, Any]]:
    """The events of a model's timeline that begin before 0 or have a negative length."""
    analysis = analysed(load(name, rows, fake=True, training=training), Options(device="h200"), training)
    made = Simulation.of(analysis)
    events = timeline.trace(made.timelines(), None, analysis.whole)["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    assert slices
    for run in made.timelines().values():
        steps = sorted((s.start_us, s.end_us) for spans in by_worker(run).values() for s in spans)
        idle = [(start, end) for spans in by_worker(run).values() for s in spans for start, end, _ in waits(s)]
        assert all(0 <= start + 1e-9 <= end + 1e-9 <= run.time_us + 1e-6 for start, end in steps + idle)
        drawn = re.findall(r'<rect class="(?:wait|s\d)" x="([-.\d]+)"', gantt(run))
        assert min(map(float, drawn)) >= LEFT
    return [e for e in slices if e["ts"] < 0 or e["dur"] < 0]


@pytest.mark.parametrize("name", ["nerf", "two_tower", "gated_ffn"])
def test_no_event_of_an_app_is_before_zero(name: str) -> None:
    assert before_zero(name, 8192) == []


def test_a_ragged_pipeline_has_a_timeline_and_says_what_was_assumed() -> None:
    p = CASES["GIN"].pipeline
    analysis = analysed(load("nerf", 64, fake=True), Options(device="h200"))
    run = Run("region0", "segments", True, p, simulate(p, {"nodes": 4096, "edges": 40960}, get("h200")))
    made = replace(Simulation.of(analysis), runs=(run,))
    assert "region0: edges: mean 10.0, largest 10, assumed all equal" in str(made)
    (found,) = made.timelines().values()
    names = {e["name"] for e in timeline.trace(made.timelines())["traceEvents"] if e["ph"] == "X"}
    assert found.spans and names and gantt(found)
    assert made.json()["runs"][0]["note"] == found.note


def test_a_ragged_region_is_simulated_with_the_edges_of_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(messages, "atomics_us", lambda _: 1e9)  # small sums pay, too
    x, edges = torch.randn(500, 16), torch.randint(500, (2, 3500))
    made = tilestream.simulate(LAYERS["GIN"](), x, edges, torch.randn(3500, 8), device="h200")
    (run,) = (run for run in made.runs if run.pipeline.ragged)
    (region,) = (r for r in made.analysis.regions if r.kind == "ragged")
    assert region.edges == 3500 and "edges: mean 7.0, largest 7, assumed all equal" in str(made)
    assert made.analysis.candidate_us(region, region.plan.chosen) == run.outcome.time_us > 0
    assert run.outcome.spans and 3500 * 4 < run.outcome.bytes["dram"]
    assert "500 nodes of 7.0 edges in the mean" in str(Report(made.analysis))


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", [*APPS, *(n for n in MODELS if n not in APPS)])
def test_no_event_of_any_model_is_before_zero(name: str) -> None:
    assert before_zero(name) == []


@pytest.mark.exhaustive
def test_no_event_of_a_training_step_is_before_zero() -> None:
    assert before_zero("mgn", training=True) == []
