"""Whole models that are measured, and those kept aside: the sets, and the three that need no other package."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from benchmarks.lib.full_models import FRESH, MODELS
from benchmarks.run import real_models


def test_models_that_are_kept_aside_are_twenty_others() -> None:
    assert len(FRESH) == 20
    assert not FRESH.keys() & MODELS.keys()
    assert all((m.batch > 0) != (m.inputs is not None) for m in (*MODELS.values(), *FRESH.values()))


@pytest.mark.parametrize("name", ["swiglu-f32", "cross-network", "two-towers"])
def test_small_models_run_in_float64_too(name: str) -> None:
    (case,) = real_models.cases(name, cpu=True)
    (made,) = case.step(case.module, case.module, case.inputs)
    wide = case.module.double()
    (exact,) = case.step(wide, wide, tuple(x.double() for x in case.inputs))
    assert exact.dtype == torch.float64
    assert (made.double() - exact).norm() < 0.02 * exact.norm()


def test_unknown_models_are_told(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["real_models", "--cpu", "bert-bas"])
    assert real_models.main() == 2
    assert "bert-base" in capsys.readouterr().err


def test_a_model_has_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row = {"case": "two-towers", "us": {"eager": 2.0, "tilestream": 1.0}, "speedup": 2.0}

    def measured(given: object, wanted: list[str], write: object) -> list[dict[str, object]]:
        assert wanted == ["two-towers"]
        write([row])  # pyright: ignore[reportCallIssue]
        return [row]

    monkeypatch.setattr(real_models, "measured", measured)
    monkeypatch.setattr("sys.argv", ["real_models", "--cpu", "two-towers", "--out", str(tmp_path)])
    assert real_models.main() == 0
    told = json.loads((tmp_path / "two-towers.json").read_text())
    assert (told["speedup"], told["fresh"]) == (2.0, False)
