"""Python's collector of cycles, kept from old objects while a graph is compiled."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Iterator

NEVER = 1_000_000
"""So many collections of younger objects no compilation has."""

_lock = threading.Lock()
_inside = 0
_threshold: tuple[int, int, int] = (0, 0, 0)


@contextlib.contextmanager
def young_only() -> Iterator[None]:
    """Collect young objects alone inside: what a compilation makes it keeps, and a full collection looks at all of it
    and all of torch again and again. Of GraphCast's training step those were 2.0 of 17 s of a CPU's host.

    Cycles that outlive two collections are freed behind it. The thresholds are the process's: the first thread that
    comes sets them and the last one that goes puts them back. A collector that is switched off stays as it is.
    """
    global _inside, _threshold
    with _lock:
        if _inside == 0:
            _threshold = gc.get_threshold()
            gc.set_threshold(*_threshold[:2], NEVER)
        _inside += 1
    try:
        yield
    finally:
        with _lock:
            _inside -= 1
            if _inside == 0:
                gc.set_threshold(*_threshold)


def collect_once() -> bool:
    """The full collection that is due since ``young_only`` put it off, where somebody waits for a compiler anyway:
    0.4 s of GraphCast's first call, between its forward graph and its backward one.

    Returns:
        True: it is done, or the collector is switched off.
    """
    if gc.isenabled():
        gc.collect()
    return True
