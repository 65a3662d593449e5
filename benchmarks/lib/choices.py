"""What our compiler chose, and by which times: the lines of its log, for rows of results.

A model that is slower than it was shows by these what was decided otherwise.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

CHOOSER = "tilestream.plan.chooser"


class _Told(logging.Handler):
    def __init__(self, lines: list[str]) -> None:
        super().__init__(logging.INFO)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        self._lines.append(record.getMessage())


@contextmanager
def choices(lines: list[str]) -> Iterator[None]:
    """Adds to ``lines`` what is chosen inside, a line a choice, in order. What was kept from before is silent."""
    chooser = logging.getLogger(CHOOSER)
    handler, before = _Told(lines), chooser.level
    chooser.addHandler(handler)
    chooser.setLevel(logging.INFO)
    try:
        yield
    finally:
        chooser.setLevel(before)
        chooser.removeHandler(handler)
