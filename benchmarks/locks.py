"""Processes of a benchmark that compile side by side, and use the GPU one after another."""

from __future__ import annotations

import contextlib
import fcntl
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

POLL_S = 0.05
BEGUN_S = time.monotonic()


@dataclass(frozen=True)
class Locks:
    """Two locks in ``folder``, which all of the processes name; without one a process has the GPU to itself.

    Args:
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
    def alone(self) -> Iterator[None]:
        """When all have compiled, or ``patience_s`` is over, and no other is timed."""
        with self._locked("timing", fcntl.LOCK_EX):
            self._await_compilers()
            yield

    @contextlib.contextmanager
    def _locked(self, name: str, how: int) -> Iterator[None]:
        if self.folder is None:
            yield
            return
        with (self.folder / name).open("w") as file:
            fcntl.flock(file, how)
            yield  # closing the file gives the lock back

    def _await_compilers(self) -> None:
        if self.folder is None:
            return
        end_s = BEGUN_S + self.patience_s
        with (self.folder / "compiling").open("w") as file:
            while time.monotonic() < end_s:
                with contextlib.suppress(BlockingIOError):
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    return
                time.sleep(POLL_S)
