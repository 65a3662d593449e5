"""Decode steps that ran: what is told of their stamps, the timeline, and ``trace --measured``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_steps import made_up, on_host
from typer.testing import CliRunner

from tilestream import devices
from tilestream.cli.main import app
from tilestream.kernels.step.kernel import StepKernel
from tilestream.kernels.step.shape import Shape
from tilestream.report import measured, timeline
from tilestream.run.record_step import StageTimes, StepRecording
from tilestream.simulator.steps import NAMES

SMALL = Shape(3, 64, 96, 4, 2, 64, 40, 27)
CTAS = 3


@pytest.fixture(scope="module")
def recording() -> StepRecording:
    """Of the kernel's own text, on the host's machine."""
    stamps: list[Any] = []
    on_host(made_up(SMALL, 17), StepKernel(SMALL, stamps=True), CTAS, stamps=stamps)
    return StepRecording("a host", 100.0, 103.0, stamps[0])


def test_stages_are_told_behind_the_last_cta_of_the_stage_in_front() -> None:
    stamps = torch.zeros(2, 3, len(NAMES), 3, dtype=torch.int64)
    for layer in range(2):
        for stage in range(5):
            begin = 10_000 * (5 * layer + stage)
            stamps[0, layer, stage] = torch.tensor([begin, begin + 1_000, begin + 4_000])
            if stage != 1:  # one CTA has no head
                stamps[1, layer, stage] = torch.tensor([begin, begin + 2_000, begin + 8_000])
    stamps[:, 2, 5] = torch.tensor([100_000, 101_000, 120_000])
    found = StepRecording("", 1.0, 1.0, stamps).by_stage()
    assert list(found) == [*NAMES[1:5], NAMES[0], NAMES[5]]
    assert found["attention"] == StageTimes(1, 6, 3, 3, 3)
    assert found["gate and up"] == StageTimes(2, 10, 4, 3, 6)
    assert found["head"].us == pytest.approx(22)


def test_slices_are_in_order_and_of_every_cta_with_rows(recording: StepRecording) -> None:
    slices = list(recording.slices())
    assert {s.cta for s in slices} == set(range(CTAS))
    assert min(s.begin_us for s in slices) == 0.0 and all(s.begin_us <= s.values_us <= s.end_us for s in slices)
    for cta in range(CTAS):
        own = [s for s in slices if s.cta == cta]
        assert all(one.end_us <= other.begin_us for one, other in zip(own, own[1:], strict=False))
    assert {s.layer for s in slices if s.stage == "head"} == {SMALL.layers}
    assert {s.stage for s in slices} == set(NAMES)


def test_the_timeline_has_a_thread_a_cta(recording: StepRecording) -> None:
    made = timeline.trace({}, None, None, {"step0": recording})
    events = [e for e in made["traceEvents"] if e["ph"] == "X"]
    assert {e["tid"] for e in events} == set(range(CTAS)) and all(e["ts"] >= 0 and e["dur"] >= 0 for e in events)
    assert {e["name"] for e in events if e["cat"] == "wait"} <= {
        f"wait: values of {s.stage}" for s in recording.slices()
    }
    assert len([e for e in events if e["cat"] == "step"]) == len(list(recording.slices()))
    assert made["otherData"]["measured"]["step0"]["overhead"] == pytest.approx(0.03)


def test_trace_measured(recording: StepRecording, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU, but for the run itself."""
    asked: list[Shape] = []
    monkeypatch.setattr("tilestream.cuda.available", lambda: "")
    monkeypatch.setattr("tilestream.devices.detect", lambda: devices.get("h200"))
    monkeypatch.setattr(measured, "record_step", lambda shape: (asked.append(shape), recording)[1])
    made = tmp_path / "decoders.py"
    made.write_text(
        "import torch\nfrom benchmarks.lib.static_decoders import Decoder\n"
        "def small():\n    return Decoder(layers=3).bfloat16().eval(), (torch.tensor([[1]]),)\n"
    )
    out, facts = tmp_path / "t.json", tmp_path / "f.json"
    words = ["trace", f"{made}:small", "--measured", "--out", str(out), "--json", str(facts)]
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0 and [shape.layers for shape in asked] == [3]
    assert "measured 100 us" in done.output and "of the last" in done.output
    (told,) = [row for row in json.loads(facts.read_text())["measured"] if row["strategy"] == "decode step"]
    assert told["error"] == pytest.approx(told["predicted_us"] / 100 - 1)
    assert {row["stage"] for row in told["stages"]} == set(recording.by_stage())
    assert any(e.get("cat") == "wait" for e in json.loads(out.read_text())["traceEvents"])
