"""Device memory that a launch needs besides its tensors: rings, flags, packed weights."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from tilestream.cuda import driver
from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS
from tilestream.kernels.parts.params import LINE_BYTES
from tilestream.kernels.stream.model import ceil_to
from tilestream.kernels.stream.tables import Tables

log = logging.getLogger(__name__)
W = TypeVar("W")


class Memory:
    """``size`` bytes at ``address``, all zero at first, given back with this object.

    They come from the driver, not from torch's allocator: a launch that is first seen inside a CUDA graph, or inside
    the memory pool of torch's CUDA-graph trees, would else leave memory in a pool that is not its own.
    """

    def __init__(self, size: int) -> None:
        self.address = driver.allocate_zeros(size)
        weakref.finalize(self, driver.free, self.address).atexit = False  # the process's end frees it anyway


class Workspace(Memory):
    """Of a row stream: epoch line, exit counter line, the queues' lines, rings, packed weights.

    Attributes:
        rings, packed: device addresses, one a queue and one a packed weight.
    """

    def __init__(self, tables: Tables) -> None:
        size = (2 + tables.lines) * LINE_BYTES
        parts = [q.depth * TILE_ROWS * q.features * DTYPE_BYTES[q.dtype] for q in tables.queues]
        parts += [p.rows * p.columns * DTYPE_BYTES[p.dtype] for p in tables.packs]
        offsets = []
        for part in parts:
            offsets.append(size)
            size += ceil_to(part, LINE_BYTES)
        super().__init__(size)
        self.epoch = self.address
        self.exits = self.epoch + LINE_BYTES
        self.lines = self.epoch + 2 * LINE_BYTES
        addresses = [self.epoch + offset for offset in offsets]
        self.rings, self.packed = addresses[: len(tables.queues)], addresses[len(tables.queues) :]
        log.debug("workspace of %d bytes for %d queues and %d packed weights", size, len(self.rings), len(self.packed))


@dataclass
class _Captured(Generic[W]):
    """The workspaces of one capture, by stream."""

    capture: int
    by_stream: dict[int, W]


class Workspaces(Generic[W]):
    """One workspace a stream; the launches that are captured into one graph on one stream share one of their own.

    Launches on one stream follow each other, so they can share flags and rings. A graph may be
    replayed on any stream beside others, so what it captured must be its alone, for as long as the
    compiled pipeline lives.

    Args:
        new: makes one.
    """

    def __init__(self, new: Callable[[], W]) -> None:
        self._new = new
        self._by_stream: dict[int, W] = {}
        self._captured: list[_Captured[W]] = []

    def take(self, stream: int, capture: int = 0) -> W:
        """The workspace for a launch on ``stream``; ``capture`` is the number of the capture under way, 0 for none."""
        if capture:
            if not self._captured or self._captured[-1].capture != capture:
                self._captured.append(_Captured(capture, {}))
            return self._of(self._captured[-1].by_stream, stream)
        return self._of(self._by_stream, stream)

    def _of(self, spaces: dict[int, W], stream: int) -> W:
        if stream not in spaces:
            spaces[stream] = self._new()
        return spaces[stream]
