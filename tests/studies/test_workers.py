"""Processes of studies leave nothing behind in the system."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from places import SOURCES

SCRIPT = """
import multiprocessing, sys
from tilestream.studies.workers import spread

HELD = []

def task(number):
    HELD.append(multiprocessing.get_context("spawn").RLock())
    return number

def bar(number):
    from tqdm import tqdm
    list(tqdm([1], disable=True))
    tqdm.get_lock()
    if number == 3:
        raise ValueError("on purpose")
    return number

if __name__ == "__main__":
    task = {"task": task, "bar": bar}[sys.argv[1]]
    try:
        print(sorted(spread(task, [(n,) for n in range(4)], 2, lambda _: None)))
    except ValueError as error:
        print(error)
"""


@pytest.mark.parametrize(("task", "said"), [("task", "[0, 1, 2, 3]"), ("bar", "on purpose")])
def test_no_semaphore_is_leaked(task: str, said: str, tmp_path: Path) -> None:
    """Not by processes that ended with their work, nor by those that were killed while torch's bars were about."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": str(SOURCES)}
    done = subprocess.run(
        [sys.executable, str(script), task], capture_output=True, text=True, env=environment, timeout=120
    )
    assert done.stdout.strip() == said, done.stderr
    assert "leaked" not in done.stderr and done.returncode == 0
