"""A lost hand-over ends the kernel, and becomes a QueueTimeout that says which queue and which line."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from pathlib import Path

import pytest
from places import pythonpath

from tilestream.cuda import one_launch

HERE = Path(__file__).parent


def stalled(what: str, limit_ns: int | None) -> tuple[subprocess.CompletedProcess[str], float]:
    start = time.perf_counter()
    done = subprocess.run(
        [sys.executable, str(HERE / "stalled_pipeline.py"), what, *([] if limit_ns is None else [str(limit_ns)])],
        env={**os.environ, "PYTHONPATH": pythonpath(HERE), "TILESTREAM_CACHE": "0"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done, time.perf_counter() - start


@pytest.mark.gpu
@pytest.mark.traps
@pytest.mark.parametrize("limit_ns", [50_000_000, None], ids=["50 ms", "the default limit"])
def test_a_tile_that_is_never_published(limit_ns: int | None):
    done, seconds = stalled("full", limit_ns)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    assert "QueueTimeout: stage 's1' on SM" in said
    assert "waited too long for tile 30 of queue 'relu2' (model.py:2): expected tile 30 of launch 0" in said
    assert "queue 'relu2': depth 4, head" in said and "tail {s1: " in said
    assert "Remedy: the CUDA context is lost: restart the process" in said
    assert seconds < 60 + one_launch.TIMEOUT_NS * 1e-9


@pytest.mark.gpu
@pytest.mark.traps
def test_a_slot_that_is_never_given_back():
    done, _ = stalled("free", 50_000_000)
    said = done.stdout + done.stderr
    assert done.returncode == 0, said
    # The producer waits for the slot, the consumer for the tile that was to go there: one gives up first.
    producer = r"stage 's0' on SM \d+ waited too long for a free slot in tile 9 of queue 'relu2' \(model.py:2\)"
    consumer = r"stage 's1' on SM \d+ waited too long for tile 9 of queue 'relu2' \(model.py:2\)"
    assert re.search(f"QueueTimeout: ({producer}|{consumer})", said), said


def test_the_limit_is_generous_but_bounded():
    """Longer than any correct kernel waits for one tile, shorter than a user's patience."""
    assert 1e9 <= one_launch.TIMEOUT_NS <= 30e9
