"""What a long command is doing: a spinner on a terminal, lines elsewhere. Always on standard error."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from rich.console import Console
from rich.status import Status
from rich.text import Text


class Progress:
    """Call it with a line whenever the work moves on; use it as a context manager."""

    def __init__(self) -> None:
        self.console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        self.start = time.perf_counter()
        self.status: Status | None = None

    def __enter__(self) -> Progress:
        if sys.stderr.isatty():
            self.status = self.console.status("starting")
            self.status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.status is not None:
            self.status.stop()

    def __call__(self, line: str) -> None:
        if self.status is not None:
            self.status.update(Text(line))
        else:
            self.console.print(f"{time.perf_counter() - self.start:6.1f} s  {line}", soft_wrap=True, markup=False)


@contextmanager
def first_compilation(progress: Progress, after_s: float = 2.0) -> Iterator[None]:
    """Say so where the engine of streams is being compiled: once on a machine, and then it is kept on disk."""
    from tilestream.sparse.engine.compiled import go

    def tell() -> None:
        if not getattr(go, "signatures", [None]):  # neither compiled nor read from disk yet
            progress("compiling the simulator, once on this machine (about 20 s)")

    timer = threading.Timer(after_s, tell)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
