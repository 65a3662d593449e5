"""Threads that make the first compiled models of a process at the same time."""

from __future__ import annotations

import os
import subprocess
import sys

import torch
from places import SOURCES

from tilestream.run import backend

SCRIPT = """
import threading
import torch

together, failures = threading.Barrier(4), []

def first() -> None:
    together.wait()
    try:
        torch.compile(torch.nn.Identity(), backend="tilestream")
    except BaseException as failure:
        failures.append(repr(failure))

threads = [threading.Thread(target=first) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print(failures)
"""


def test_four_threads_ask_for_the_back_end_first() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(SOURCES)},
        timeout=120,
    )
    assert done.stdout.strip() == "[]", done.stdout + done.stderr


def test_other_names_are_still_registered_once() -> None:
    from torch._dynamo.backends.registry import list_backends, lookup_backend

    backend.share()
    assert lookup_backend("tilestream") is lookup_backend("tilestream") is backend.tilestream
    assert "tilestream" in list_backends() and "inductor" in list_backends()
    table = backend.Backends({"inductor": 1, "tilestream": 2})
    assert "inductor" in table and table["tilestream"] == 2
    assert torch.compile(torch.nn.Identity(), backend="tilestream") is not None
