"""What a kernel leaves behind when a bounded wait expires, and the error made of it."""

from __future__ import annotations

import atexit
import contextlib
import logging
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator

import torch

from tilestream.errors import DeviceError, InputError, QueueTimeout, TilestreamError
from tilestream.kernels.stream.tables import INDEX, Tables

log = logging.getLogger(__name__)

INDEX_OUTSIDE = 2  # roles.cuh: in the place of waits_for_free, where an index names no row
NO_ROW = "the CUDA context is lost: restart the process, with indices that exist"
_HEADER = 5  # 64-bit words before the flags
_records: weakref.WeakSet[Record] = weakref.WeakSet()


class Record(ABC):
    """64-bit words in pinned host memory that survive the trap; the low half of the first says that a kernel wrote
    them. Nobody may call again after that: a record that is left is logged when the process ends."""

    def __init__(self, words: int) -> None:
        self.words = torch.zeros(words, dtype=torch.int64, pin_memory=torch.cuda.is_available())
        _records.add(self)

    @property
    def address(self) -> int:
        return self.words.data_ptr()

    def check(self) -> None:
        """Raise ``QueueTimeout`` or ``InputError`` if a launch has left a record."""
        if self.claimed:
            raise self.error()

    @contextlib.contextmanager
    def explained(self) -> Iterator[None]:
        """What is enqueued inside fails with this record's error, where there is one, not with a launch's that failed:
        torch and the driver may meet the lost context before anybody calls again."""
        self.check()
        try:
            yield
        except (RuntimeError, DeviceError) as failure:
            if self.claimed:
                raise self.error() from failure
            raise

    @property
    def claimed(self) -> bool:
        return bool(int(self.words[0]) & 0xFFFFFFFF)

    def error(self) -> TilestreamError:
        return QueueTimeout(self.describe(), "the CUDA context is lost: restart the process; report this message")

    def halves(self, words: int) -> list[tuple[int, int]]:
        """The low and the high half of the first words."""
        return [(int(w) & 0xFFFFFFFF, (int(w) >> 32) & 0xFFFFFFFF) for w in self.words[:words]]

    @abstractmethod
    def describe(self) -> str:
        """Who waited for what."""


class IndexRecord(Record):
    """What ``give_up`` of lanes.cuh leaves behind where an index names no row.

    Words: claimed | what, where | rows | index.
    """

    def __init__(self) -> None:
        super().__init__(4)

    @property
    def found(self) -> tuple[int, int, int, int]:
        """What and where, by the kernel's own meaning, how many rows there are, and the index."""
        (what, where), rows, index = self.halves(2)[1], int(self.words[2]), int(self.words[3])
        return what, where, rows, index

    def error(self) -> TilestreamError:
        return InputError(self.describe(), NO_ROW)


class Dump(Record):
    """What a row stream's kernel leaves behind.

    Of a wait that expired, or of an index that names no row of its table.
    Words: claimed | stage, sm | queue, tile | waits_for_free, expected, found, then every flag line.
    """

    def __init__(self, tables: Tables, stages: list[str]) -> None:
        super().__init__(_HEADER + max(tables.lines, 1))
        self.tables, self.stages = tables, stages

    def describe(self) -> str:
        half = self.halves(3)
        if half[2][1] == INDEX_OUTSIDE:
            return self._index(pointer=half[1][1], row=half[2][0])
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

    def error(self) -> TilestreamError:
        if self.halves(3)[2][1] == INDEX_OUTSIDE:
            return InputError(self.describe(), NO_ROW)
        return super().error()

    def _index(self, pointer: int, row: int) -> str:
        kind, name, _ = self.tables.pointers[pointer]
        rows, found = (int(w) for w in self.words[3:5])
        table = kind.removeprefix(INDEX)
        return f"index {name!r} is {found} at row {row}, and table {table!r} has {rows} rows"


def _ticket(word: int) -> str:
    return f"tile {(word & 0xFFFFFFFF) - 1} of launch {(word >> 32) & 0xFFFFFFFF}"


@atexit.register
def _tell() -> None:
    """A process that ends on torch's "unspecified launch failure" says at least then which queue it was."""
    for record in _records:
        if record.claimed:
            log.error("%s: %s", type(record.error()).__name__, record.error())
