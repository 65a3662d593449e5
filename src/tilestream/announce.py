"""One line to the user where something of theirs runs otherwise than they asked; the trace goes to the log."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator

from tilestream.errors import TilestreamError

log = logging.getLogger(__name__)

STRICT = "TILESTREAM_STRICT"
"""Where this environment variable is set, an exception of ours that no rule foresees is raised. Our tests set it."""

_said: set[str] = set()


def announce(message: str) -> None:
    """Log one line that users see (a warning), once a process."""
    if message not in _said:
        _said.add(message)
        log.warning("tilestream: %s", message)


def announce_failure(what: str, failure: Exception) -> None:
    """Say what an exception costs, in one line; its trace goes to the log.

    Raises:
        Exception: ``failure`` itself, under ``TILESTREAM_STRICT``, unless it is one that tilestream raises on purpose.
    """
    if os.environ.get(STRICT) and not isinstance(failure, TilestreamError):
        raise failure
    log.info("%s", what, exc_info=failure)
    kind = "" if isinstance(failure, TilestreamError) else f"{type(failure).__name__}: "
    announce(f"{what}: {kind}{first_line(failure)}")


@contextlib.contextmanager
def announced(what: str, fallback: bool = True) -> Iterator[None]:
    """An exception inside ends the block, and costs no more than ``what`` says.

    Raises:
        Exception: as ``announce_failure``; with ``fallback=False`` any.
    """
    try:
        yield
    except Exception as failure:
        if not fallback:
            raise
        announce_failure(what, failure)


@contextlib.contextmanager
def said_later(what: str) -> Iterator[None]:
    """An exception inside ends the block; what comes after it meets the same one, and says why."""
    try:
        yield
    except Exception as failure:
        log.debug("%s: what comes after says why", what, exc_info=failure)


def first_line(failure: BaseException) -> str:
    """The first line of an exception's message."""
    lines = str(failure).strip().splitlines()
    return lines[0] if lines else "no message"
