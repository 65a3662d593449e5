"""What a kernel leaves behind when a bounded wait expires, and the error made of it."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import logging
import weakref
from collections.abc import Callable, Iterator

import torch

from tilestream.errors import DeviceError, InputError, TilestreamError
from tilestream.kernels.kernel import NO_ROW, halves

log = logging.getLogger(__name__)

_records: weakref.WeakSet[Record] = weakref.WeakSet()


class Record:
    """64-bit words in pinned host memory that survive the trap; the low half of the first says that a kernel wrote
    them. Nobody may call again after that: a record that is left is logged when the process ends.

    Args:
        told: what they say, as the kernel's family reads them.
    """

    def __init__(self, words: int, told: Callable[[list[int]], TilestreamError]) -> None:
        self.words = torch.zeros(words, dtype=torch.int64, pin_memory=torch.cuda.is_available())
        self._told = told
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
        return ctypes.c_uint32.from_address(self.address).value != 0  # asked at every call: an index takes torch longer

    def error(self) -> TilestreamError:
        return self._told(self.words.tolist())


def index_record(describe: Callable[[int, int, int, int], str]) -> Record:
    """What ``give_up`` of lanes.cuh leaves behind where an index names no row.

    Words: claimed | what, where | rows | index.

    Args:
        describe: what and where, by the kernel's own meaning, how many rows there are, and the index.
    """

    def told(words: list[int]) -> TilestreamError:
        return InputError(describe(*halves(words, 2)[1], *words[2:4]), NO_ROW)

    return Record(4, told)


@atexit.register
def _tell() -> None:
    """A process that ends on torch's "unspecified launch failure" says at least then which queue it was."""
    for record in _records:
        if record.claimed:
            log.error("%s: %s", type(record.error()).__name__, record.error())
