"""Every example runs, and says what it should."""

from __future__ import annotations

import runpy
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
