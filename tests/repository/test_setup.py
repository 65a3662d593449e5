"""What a fresh clone does first: `make setup`, and what the suite says before its first test."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from collected import SKIPPED, first_line, ordered
from places import ROOT


@pytest.mark.skipif(shutil.which("make") is None, reason="make is not installed")
def test_an_old_python_is_refused_before_anything_is_fetched(tmp_path: Path):
    old, venv = tmp_path / "python3.10", tmp_path / "venv"
    old.write_text(
        f"#!/bin/sh\nexec {sys.executable} -c 'import sys; sys.version_info = (3, 10, 4); exec(sys.argv[2])' \"$@\"\n"
    )
    old.chmod(0o755)
    command = ["make", "setup", f"PYTHON={old}", f"VENV={venv}"]
    alone = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}  # make test
    made = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, env=alone)
    assert made.returncode != 0 and not made.stdout and not venv.exists()
    assert made.stderr.startswith(
        f"set-up: tilestream needs Python 3.11 or later, and {old} is 3.10. Name another: make setup PYTHON=python3.11"
    )


def test_skipped_tests_come_last(request: pytest.FixtureRequest):
    def item(name: str, *marks: pytest.MarkDecorator, skipped: bool = False) -> pytest.Item:
        made = pytest.Function.from_parent(request.node.parent, name=name, callobj=lambda: None)
        for mark in marks:
            made.add_marker(mark)
        made.stash[SKIPPED] = skipped
        return made

    early, gpu = pytest.mark.early, pytest.mark.xdist_group("gpu")
    given = [item("a", gpu, skipped=True), item("b"), item("c", early), item("d", gpu), item("e", early, skipped=True)]
    assert [each.name for each in ordered(given)] == ["c", "d", "b", "a", "e"]


def test_the_first_line():
    assert first_line(4901, 875, "no driver") == (
        "4,901 tests, 875 of them need a GPU and are skipped, at the end (no driver); about 17 minutes on 2 cores"
    )
    assert "875 of them on the GPU;" in first_line(4901, 875, "")
