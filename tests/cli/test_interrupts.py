"""Ctrl-C, and worse, in commands with processes of their own: real processes, real signals, and nobody left."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="no /proc to find processes in")
COMMANDS = {
    "sweep": ("sweep", "llama_prefill", "llama_decode", "--jobs", "2"),
    "reproduce": ("reproduce", "kitsune", "--jobs", "2"),
    "one process": ("sweep", "llama_prefill", "--jobs", "1"),
    "sparse": ("sparse", "reproduce"),
}
WAIT_S = 240.0  # where others use the machine too, a process takes a minute to import torch


def session(leader: int) -> set[int]:
    """Processes of a session that live."""
    found = set()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _parent, _group, its = stat.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue  # ended meanwhile
        if int(its) == leader and state != "Z":
            found.add(int(stat.parent.name))
    return found


def until(true, what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not true():
        assert time.monotonic() < end, what
        time.sleep(0.02)


@pytest.fixture
def start(tmp_path: Path) -> Iterator:
    started = []

    def begin(name: str, processes: int) -> tuple[subprocess.Popen, Path]:
        """A command in a session of its own that has said what it does, and has so many processes.

        Two workers make four: multiprocessing has one that tracks what they share.
        """
        said = tmp_path / "said"
        with said.open("w") as f:
            p = subprocess.Popen(
                [sys.executable, "-m", "tilestream", *COMMANDS[name]], stdout=f, stderr=f, start_new_session=True
            )
        started.append(p)
        until(lambda: said.read_text() and len(session(p.pid)) >= processes, f"{name} has not begun")
        assert p.poll() is None, said.read_text()
        return p, said

    yield begin
    for p in started:
        for left in session(p.pid):
            os.kill(left, signal.SIGKILL)
        p.wait()


@pytest.mark.parametrize(
    ("name", "processes", "signals"),
    [("sweep", 4, 1), ("sweep", 4, 3), ("reproduce", 3, 3), ("one process", 1, 3), ("sparse", 1, 3)],
)
@pytest.mark.every(2)
def test_interrupts_end_a_command_with_all_its_processes(start, name: str, processes: int, signals: int) -> None:
    p, said = start(name, processes)
    for _ in range(signals):
        os.killpg(p.pid, signal.SIGINT)  # as a terminal does: to every process of the group
    assert p.wait(WAIT_S) == 130
    until(lambda: not session(p.pid), "a process is left")
    assert "Traceback" not in said.read_text()


def test_workers_end_with_a_parent_that_is_killed(start) -> None:
    """One that is still starting says that nobody is there to tell it what to do; it ends all the same."""
    p, _ = start("sweep", 4)
    p.kill()
    p.wait(WAIT_S)
    until(lambda: not session(p.pid), "a process is left")
