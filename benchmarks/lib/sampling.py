"""Where a call's wall time goes, by samples of its thread's stack: no tracing, so cheap functions stay cheap."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import FrameType

PERIOD_S = 0.002


@dataclass
class Calls:
    """A function, the samples in it, and the functions that it called."""

    samples: int = 0
    called: dict[str, Calls] = field(default_factory=dict)

    def add(self, stack: list[str]) -> None:
        """Count one stack, the outermost function first."""
        at = self
        at.samples += 1
        for name in stack:
            at = at.called.setdefault(name, Calls())
            at.samples += 1

    def lines(self, least: float, whole: int = 0, depth: int = 0) -> Iterator[str]:
        """The tree, in percent of the whole, of every call above ``least`` percent; an only child stands beside."""
        whole = whole or self.samples
        for name, calls in sorted(self.called.items(), key=lambda item: -item[1].samples):
            percent = 100 * calls.samples / max(1, whole)
            if percent < least:
                continue
            # A chain in which each calls only the next is one line: its first and its last function.
            last, end = name, calls
            while len(end.called) == 1 and (only := next(iter(end.called.items())))[1].samples == end.samples:
                last, end = only
            chain = name if last == name else f"{name} ... {last}"
            yield f"{percent:5.1f} {'  ' * depth}{chain}"
            yield from end.lines(least, whole, depth + 1)


@contextlib.contextmanager
def sampled() -> Iterator[Calls]:
    """Sample the calling thread's stack every two milliseconds, from below the frame that asks."""
    thread, tree, end = threading.get_ident(), Calls(), threading.Event()

    def sample() -> None:
        while not end.wait(PERIOD_S):
            stack: list[str] = []
            frame: FrameType | None = sys._current_frames().get(thread)
            while frame is not None:
                stack.append(f"{_short(frame.f_code.co_filename)}:{frame.f_code.co_name}")
                frame = frame.f_back
            tree.add(stack[::-1])

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    start = time.perf_counter()
    try:
        yield tree
    finally:
        end.set()
        sampler.join()
        seconds = time.perf_counter() - start
        print(f"{seconds:.3f} s, {tree.samples} samples", file=sys.stderr)


def _short(path: str) -> str:
    """A file's path below the folder of its packages."""
    return path.split("-packages/")[-1].split("/src/")[-1]
