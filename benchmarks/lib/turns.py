"""Processes that share a GPU: they compile side by side, and time one after another, by locks on files of a folder."""

from __future__ import annotations

import contextlib
import fcntl
import functools
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from tilestream.run import timing

POLL_S = 0.05
BEGUN_S = time.monotonic()
_held = threading.local()


@dataclass(frozen=True)
class Turns:
    """Turns at a GPU, one process at a time; those inside each other are one.

    Args:
        folder: what all of the processes name; without one a process has the GPU to itself.
        patience_s: seconds since this process began, after which those that still compile are waited for no longer.
    """

    folder: Path | None = None
    patience_s: float = 60.0

    @contextlib.contextmanager
    def compiling(self) -> Iterator[None]:
        """Beside others that compile."""
        with self._locked("compiling", fcntl.LOCK_SH):
            yield

    @contextlib.contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for the others, and hold the GPU. Its clocks are up where one of them had it just before."""
        if getattr(_held, "turn", False):
            yield
            return
        with self._locked("timing", fcntl.LOCK_EX) as file:
            if file is not None and _was_held(file):
                timing._timed_until_s[0] = time.perf_counter()
            _held.turn = True
            try:
                yield
            finally:
                _held.turn = False
                if file is not None:
                    file.write(b".")  # a byte a turn: when the last one ended is when the file was written

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """A turn, once all have compiled or ``patience_s`` is over. Who compiles may need turns."""
        if not getattr(_held, "turn", False):
            self._await_compilers()
        with self.turn():
            yield

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

    @contextlib.contextmanager
    def _locked(self, name: str, how: int) -> Iterator[IO[bytes] | None]:
        if self.folder is None:
            yield None
            return
        with self._file(name) as file:
            fcntl.flock(file, how)
            yield file  # closing the file gives the lock back

    def _await_compilers(self) -> None:
        if self.folder is None:
            return
        end_s = BEGUN_S + self.patience_s
        with self._file("compiling") as file:
            while time.monotonic() < end_s:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                time.sleep(POLL_S)

    def _file(self, name: str) -> IO[bytes]:
        assert self.folder is not None
        self.folder.mkdir(parents=True, exist_ok=True)
        return (self.folder / name).open("ab", buffering=0)


def _was_held(file: IO[bytes]) -> bool:
    """Whether a turn ended so short a time ago that the GPU's clocks are still up."""
    found = os.fstat(file.fileno())
    return found.st_size > 0 and time.time() - found.st_mtime < timing.KEPT_S
