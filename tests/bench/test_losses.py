"""The benchmarks that train to a loss and that hold gradients against float64, dry: the reference machine, toys."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest
import torch


@pytest.mark.usefixtures("fresh", "plain")
def test_a_dry_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = importlib.import_module("benchmarks.run.losses")
    out = tmp_path / "losses.json"
    args = ["nerf", "--device", "cpu", "--tiny", "--steps", "4", "--seeds", "2", "--json", str(out)]
    eager, ours = losses.main(args)
    assert [t.arm for t in (eager, ours)] == ["eager", "tilestream"] and eager.spread > 0
    for one, other in zip(eager.runs, ours.runs, strict=True):  # the same seeds, data and order
        assert one.steps == other.steps == 4 and abs(one.end - other.end) < 0.02 * one.end
    assert [found["mean"] for found in json.loads(out.read_text())["trained"]] == [eager.mean, ours.mean]
    assert "nerf tilestream seed 1: step 4 of 4" in capsys.readouterr().out


@pytest.mark.usefixtures("fresh", "plain")
def test_gradients_against_float64(tmp_path: Path) -> None:
    errors = importlib.import_module("benchmarks.run.gradient_errors")
    out = tmp_path / "errors.json"
    out.write_text(json.dumps({"rows": [{"case": "nerf_65536", "arms": {}}, {"case": "mgn", "arms": {}}]}))
    assert errors.main(["nerf_65536", "--device", "cpu", "--tiny", "--json", str(out)]) == 0
    made, kept = json.loads(out.read_text())["rows"]
    assert kept == {"case": "mgn", "arms": {}} and made["launches"] >= 2
    eager, ours = made["arms"]["eager"], made["arms"]["tilestream"]
    assert 0 < eager["error"] <= eager["worst"] and ours["error"] <= 2 * eager["error"] and ours["same_bits"]


def test_errors_of_gradients() -> None:
    errors = importlib.import_module("benchmarks.run.gradient_errors")
    exact = [torch.tensor([3.0, 0.0]).double(), torch.tensor([4.0]).double()]
    found = errors.judged([torch.tensor([3.0, 0.5]), torch.tensor([4.0])], exact)
    assert found["error"] == pytest.approx(0.1) and found["worst"] == pytest.approx(0.5 / 3)


@pytest.mark.parametrize("case", ["mgn", "dlrm"])
def test_other_tasks_can_be_learned(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager alone, and out of time after the first line."""
    learning = importlib.import_module("benchmarks.run.learning")
    monkeypatch.setattr(learning, "TOLD", 60)
    monkeypatch.setattr(learning, "RATE", 1e-2)
    found = learning.task(case, tiny=True, device="cpu")
    (arm,) = learning.arms(found, ["eager"])
    told: list[str] = []
    run = learning.train(arm, learning.Step(arm, found), found, 0, 120, 0.0, told.append)
    assert run.steps == 60 and len(told) == 1 and run.end < run.curve[0]


def test_noise() -> None:
    losses = importlib.import_module("benchmarks.run.losses")

    def trained(*ends: float) -> object:
        return losses.summary("a", "b", [losses.Run("a", "b", n, 1, 1.0, end, (), 1.0) for n, end in enumerate(ends)])

    assert losses.within_noise(trained(1.0, 1.2, 1.1), trained(1.1, 1.2, 1.15))
    assert not losses.within_noise(trained(1.0, 1.2, 1.1), trained(2.0, 2.2, 2.1))
