"""A decode step in explain, simulate, the page and the timeline: one prediction, with the user's lines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import tilestream
from benchmarks.lib.static_decoders import Decoder
from tilestream.cli.main import app
from tilestream.report import html, steps, timeline

IDS = torch.tensor([[3]])
OPTIONS = {"decode_step": True}


def decoder(**given: Any) -> Decoder:
    torch.manual_seed(0)
    return Decoder(layers=3, **given).bfloat16().eval()


@torch.no_grad()
@pytest.mark.parametrize("device", ["h200", "h200+sms*2+hand_over_s*0.1"])
def test_explain_and_simulate_say_the_same(device: str) -> None:
    model = decoder()
    report = tilestream.explain(model, IDS, options=OPTIONS, device=device)
    simulated = tilestream.simulate(model, IDS, options=OPTIONS, device=device)
    step = report.json()["launches"][-1]
    assert step["step"]["stages"][1]["name"] == "attention"
    assert report.json()["launches"] == simulated.json()["launches"]
    assert report.json()["predicted_us"] == simulated.json()["predicted_us"]
    text, page = str(report), html.render(report, html.content(simulated))
    for shown in (text, str(simulated), page):
        assert "16 stages, 15 hand-overs" in shown
        assert "static_decoders.py" in shown and "self.down(" in shown
    assert "1 decode step" in text
    assert int(model.layers[0].length) == 0  # pyright: ignore[reportArgumentType]
    stages = [e for e in timeline.trace({}, None, report.analysis.whole)["traceEvents"] if e.get("cat") == "stage"]
    assert len(stages) == 16
    assert sum(e["dur"] for e in stages) == pytest.approx(step["predicted_us"] - step["step"]["launch_us"], abs=0.01)


@torch.no_grad()
def test_what_is_no_step_is_shown_as_without_the_option() -> None:
    model = decoder(act=nn.functional.softplus)
    with_option, without = (tilestream.explain(model, IDS, options=o, device="h200") for o in (OPTIONS, {}))
    told = with_option.json().pop("notes")
    assert len(told) == 1 and "no decode step is one kernel" in told[0]
    assert with_option.json()["launches"] == without.json()["launches"]


@torch.no_grad()
def test_a_step_that_is_predicted_to_be_slower_is_not_shown() -> None:
    report = tilestream.explain(decoder(), IDS, options=OPTIONS, device="h200+hand_over_s*100")
    assert not any("step" in launch for launch in report.json()["launches"])
    assert "with its decode step as one kernel it is predicted to take" in report.json()["notes"][-1]


def test_commands(tmp_path: Path) -> None:
    made = tmp_path / "decoders.py"
    made.write_text(
        "import torch\nfrom benchmarks.lib.static_decoders import Decoder\n"
        "def small():\n    return Decoder().bfloat16().eval(), (torch.tensor([[1]]),)\n"
    )
    words = ["trace", f"{made}:small", "--decode-step", "--device", "h200+hand_over_s*0.5", "--out"]
    done = CliRunner().invoke(app, [*words, str(tmp_path / "t.json")], catch_exceptions=False)
    assert done.exit_code == 0 and "10 hand-overs" in done.output
    stages = [e for e in json.loads((tmp_path / "t.json").read_text())["traceEvents"] if e.get("cat") == "stage"]
    took = [e["args"]["hand-over us"] for e in stages]
    ((_, whole),) = steps.of(
        tilestream.explain(Decoder().bfloat16().eval(), torch.tensor([[1]]), device="h200").analysis
    )
    longer = [stage.hand_over_us - us for stage, us in zip(whole.stages, took, strict=True)]
    assert longer == pytest.approx([0.0] + [0.5] * 10), "half of a hand-over is left, and all that is read"
