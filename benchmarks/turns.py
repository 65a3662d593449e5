"""Processes that share a GPU and time on it one after another: a lock on a file, held while something is timed."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tilestream.run import timing

_depth = threading.local()


class Turns:
    """Turns at a GPU, one process at a time; those inside each other are one."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the others, and hold the GPU. Its clocks are up where one of them had it just before."""
        depth = getattr(_depth, "n", 0)
        if not depth:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            if time.time() - os.fstat(self._file.fileno()).st_mtime < timing.KEPT_S:
                timing._timed_until_s[0] = time.perf_counter()
        _depth.n = depth + 1
        try:
            yield
        finally:
            _depth.n = depth
            if not depth:
                os.utime(self._file.fileno())
                fcntl.flock(self._file, fcntl.LOCK_UN)

    def take_part(self) -> None:
        """Time what tilestream and Inductor choose by in turns, from now on in this process."""
        from torch._inductor.runtime import benchmarking

        own = timing.interleaved
        shared = self._in_turn(own)
        for module in list(sys.modules.values()):
            if getattr(module, "interleaved", None) is own:
                module.interleaved = shared  # pyright: ignore[reportAttributeAccessIssue]
        for kind in vars(benchmarking).values():
            if isinstance(kind, type) and "benchmark_gpu" in vars(kind):
                kind.benchmark_gpu = self._in_turn(kind.benchmark_gpu)  # pyright: ignore[reportAttributeAccessIssue]

    def _in_turn(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(function)
        def waits(*args: Any, **kwargs: Any) -> Any:
            with self.turn():
                return function(*args, **kwargs)

        return waits
