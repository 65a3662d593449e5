"""Processes that compile beside each other, and time one at a time."""

from __future__ import annotations

import fcntl
import tempfile
from pathlib import Path
from typing import Any

from tilestream.run import timing


def alone_when_timed() -> None:
    """While one process times what it chooses among, no other does.

    What else they run on the GPU meanwhile, first calls and captures, is not kept apart: a choice between ways that
    take nearly the same may come out otherwise than in a process by itself.
    """
    interleaved, lock = timing.interleaved, Path(tempfile.gettempdir()) / "tilestream_gnn.lock"

    def locked(*given: Any, **named: Any) -> list[list[float]]:
        with lock.open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            return interleaved(*given, **named)

    timing.interleaved = locked
