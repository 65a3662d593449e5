"""What a kernel leaves behind when a bounded wait expires, and the error made of it."""

from __future__ import annotations

import atexit
import logging
import weakref
from typing import Protocol

import torch

from tilestream.cuda.tables import Tables
from tilestream.errors import QueueTimeout

log = logging.getLogger(__name__)

_HEADER = 5  # 64-bit words before the flags
_records: weakref.WeakSet[Record] = weakref.WeakSet()


class Record(Protocol):
    """What a kernel may have left behind."""

    @property
    def claimed(self) -> bool: ...
    def error(self) -> QueueTimeout: ...


def tell_at_exit(record: Record) -> None:
    """Log the record when the process ends, if a kernel has left one: nobody may have called again."""
    _records.add(record)


class Dump:
    """A record in pinned host memory that survives the trap.

    Words: claimed | stage, sm | queue, tile | waits_for_free, expected, found, then every flag line.
    """

    def __init__(self, tables: Tables, stages: list[str]) -> None:
        self.tables, self.stages = tables, stages
        size = _HEADER + max(tables.lines, 1)
        self.words = torch.zeros(size, dtype=torch.int64, pin_memory=torch.cuda.is_available())
        tell_at_exit(self)

    @property
    def address(self) -> int:
        return self.words.data_ptr()

    def check(self) -> None:
        """Raise ``QueueTimeout`` if a launch has left a record."""
        if self.claimed:
            raise self.error()

    @property
    def claimed(self) -> bool:
        return bool(int(self.words[0]) & 0xFFFFFFFF)

    def error(self) -> QueueTimeout:
        return QueueTimeout(self.describe(), "the CUDA context is lost: restart the process; report this message")

    def describe(self) -> str:
        half = [(int(w) & 0xFFFFFFFF, (int(w) >> 32) & 0xFFFFFFFF) for w in self.words[:3]]
        stage, sm, queue, tile, free = half[0][1], half[1][0], half[1][1], half[2][0], half[2][1]
        expected, found = (int(w) for w in self.words[3:5])
        q = self.tables.queues[queue]
        what = "a free slot in tile" if free else "tile"
        lines = [
            f"stage {self.stages[stage]!r} on SM {sm} waited too long for {what} {tile} of queue {q.tile!r} "
            f"({q.source or 'no source line'}): expected {_ticket(expected)}, found {_ticket(found)}"
        ]
        for spec in self.tables.queues:
            first, count = _HEADER + spec.line, spec.depth * (1 + len(spec.consumers))
            flags = [int(w) for w in self.words[first : first + count]]
            head = max((f & 0xFFFFFFFF for f in flags[: spec.depth]), default=0)
            tails = [
                f"{c}: {max(f & 0xFFFFFFFF for f in flags[(1 + k) * spec.depth : (2 + k) * spec.depth])}"
                for k, c in enumerate(spec.consumers)
            ]
            lines.append(f"queue {spec.tile!r}: depth {spec.depth}, head {head}, tail {{{', '.join(tails)}}}")
        return "\n  ".join(lines)


def _ticket(word: int) -> str:
    return f"tile {(word & 0xFFFFFFFF) - 1} of launch {(word >> 32) & 0xFFFFFFFF}"


@atexit.register
def _tell() -> None:
    """A process that ends on torch's "unspecified launch failure" says at least then which queue it was."""
    for record in _records:
        if record.claimed:
            log.error("QueueTimeout: %s", record.error())
