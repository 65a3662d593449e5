"""Ctrl-C in a command: the first unwinds it, further ones are patience running out, and the third ends it at once."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

EXIT_CODE = 130  # what shells report for a process that SIGINT ended
MOST = 3

_seen = 0


def install() -> None:
    """Raise ``KeyboardInterrupt`` at the first SIGINT only, so that no clean-up is cut short by the next."""
    signal.signal(signal.SIGINT, _interrupted)
    sys.unraisablehook = _swallowed


def _interrupted(number: int, frame: FrameType | None) -> None:
    global _seen
    _seen += 1
    if _seen == 1:
        raise KeyboardInterrupt
    if _seen >= MOST:
        end()


def _swallowed(unraisable: sys.UnraisableHookArgs) -> None:
    """A callback from C, as a compiler's, cannot raise: an interrupt that comes inside it would be lost."""
    if isinstance(unraisable.exc_value, KeyboardInterrupt):
        end()
    sys.__unraisablehook__(unraisable)


def seen() -> bool:
    """Whether a SIGINT has come."""
    return _seen > 0


def end() -> NoReturn:
    """Leave without waiting for threads, and with nobody left behind."""
    for worker in multiprocessing.active_children():
        worker.kill()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(EXIT_CODE)


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """SIGINT waits until the block is over. Processes started inside never see one: they live as their parent says."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
