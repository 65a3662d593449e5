"""Every example runs, and says what it should."""

from __future__ import annotations

import runpy
import shutil
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent / "examples"


def test_handmade_pipeline(capsys: pytest.CaptureFixture[str]):
    runpy.run_path(str(EXAMPLES / "handmade_pipeline.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "3 stages, legal on an H200" in said
    assert "VerifyError: queue of 'code' from 'encode' has depth 1 < 2" in said
    assert "PipelineDeadlock: no stage of pipeline 'handmade' can go on" in said
    assert "the same bits" in said
    assert "GPU: " in said


@pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")
def test_recorded_timeline(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sys.argv", ["recorded_timeline.py", str(tmp_path)])
    runpy.run_path(str(EXAMPLES / "recorded_timeline.py"), run_name="__main__")
    said = capsys.readouterr().out
    assert "steps of 3 stages" in said or "steps of 2 stages" in said
    assert "work of a mean SM" in said
    assert (tmp_path / "timeline.json").exists()
