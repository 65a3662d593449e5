"""What a kernel with stamps writes down: where it goes, how much there may be, and what it says.

The record of who did what when is made by ``include/stamps.cuh``, on the GPU and in the host build alike.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass
from enum import IntEnum
from itertools import pairwise

import numpy as np

from tilestream.cuda import driver
from tilestream.cuda.workspace import Memory
from tilestream.errors import DeviceError
from tilestream.ir.sizes import tiles_of
from tilestream.kernels.parts.source import KernelSource
from tilestream.kernels.stream.emit import ROLES
from tilestream.kernels.stream.model import ceil_to

log = logging.getLogger(__name__)

MOST_BYTES = 256 * 2**20
"""Of device memory for the stamps of one launch; what finds no room is counted."""


class Event(IntEnum):
    """As in ``stamps.cuh``. Up to ``IDLE`` something begins for a tile; from ``NO_WEIGHTS`` on it is a wait."""

    PRODUCT = 0
    EPILOGUE = 1
    LOAD_WEIGHTS = 2
    LOAD_ROWS = 3
    STORE_TILE = 4
    IDLE = 5
    NO_WEIGHTS = 6
    NO_ROWS = 7
    NO_STAGING = 8
    WEIGHTS_AHEAD = 9
    ROWS_AHEAD = 10
    NOTHING_STAGED = 11
    QUEUE_EMPTY = 12
    QUEUE_FULL = 13

    @property
    def waits(self) -> bool:
        return self >= Event.NO_WEIGHTS


HEADER = np.dtype(
    [(n, np.uint64) for n in ("start_ns", "start_clock", "end_ns", "end_clock")]
    + [("stamps", np.int32), ("sm", np.uint32), ("unused", np.uint32, 6)]
)
RAW = np.dtype([("clock", np.uint64), ("value", np.uint32), ("event", np.uint32)])


@dataclass(frozen=True, slots=True)
class Stamp:
    """What a role does for tile ``of``, or waits for, in nanoseconds from the origin; of a wait at an end of a queue
    ``of`` is the queue's number."""

    event: Event
    of: int
    start_ns: float
    end_ns: float


@dataclass(frozen=True)
class RoleLog:
    """The stamps of one role of one CTA, in order. ``dropped`` found no room."""

    cta: int
    role: int
    sm: int
    start_ns: float
    end_ns: float
    activities: tuple[Stamp, ...]
    waits: tuple[Stamp, ...]
    dropped: int


@dataclass(frozen=True)
class LaunchLog:
    """The stamps of one launch. ``origin_ns``, on the GPU's common clock, is when its first role started."""

    source: KernelSource
    rows: int
    origin_ns: int
    roles: tuple[RoleLog, ...]

    @property
    def end_ns(self) -> float:
        """When the last role ended, from the origin."""
        return max(r.end_ns for r in self.roles)

    @property
    def dropped(self) -> int:
        return sum(r.dropped for r in self.roles)


def capacity(source: KernelSource, rows: int, ctas: int) -> int:
    """Stamps that each role of a launch has room for: all that it can write, or what ``MOST_BYTES`` allow."""
    tables = source.tables
    steps = max(len(s.ops) for s in source.pipeline.stages)
    waits = len(tables.page_ops) + len(tables.load_ops) + len(tables.store_ops) + 2 * len(tables.queues)
    # Of a unit: two activities a step, two a group of stores, and every wait there is.
    each = 2 * steps + len(tables.store_bounds) + waits + 4
    taken = max(s.tiles_per_step for s in source.pipeline.stages)
    tiles = ceil_to(tiles_of(rows, source.pipeline), taken)
    units = max(
        math.ceil(tiles / s.tiles_per_step / (ctas if len(source.pipeline.stages) == 1 else s.replicas))
        for s in source.pipeline.stages
    )
    return max(1, min(units * each, MOST_BYTES // (ctas * len(ROLES) * RAW.itemsize)))


def buffer_bytes(ctas: int, room: int) -> int:
    """Of device memory that a launch of ``ctas`` CTAs with ``room`` stamps a role writes to."""
    return ctas * len(ROLES) * (HEADER.itemsize + room * RAW.itemsize)


class Buffer(Memory):
    """Device memory for the stamps of launches of ``source`` over ``rows`` rows. The last launch's are in it."""

    def __init__(self, source: KernelSource, rows: int, ctas: int) -> None:
        self.source, self.rows, self.ctas = source, rows, ctas
        self.room = capacity(source, rows, ctas)
        super().__init__(buffer_bytes(ctas, self.room))

    def read(self) -> LaunchLog:
        """The stamps, after the launch has ended."""
        raw = driver.read(self.address, buffer_bytes(self.ctas, self.room))
        return read(raw, self.source, self.rows, self.ctas, self.room)


def read(raw: bytes | bytearray, source: KernelSource, rows: int, ctas: int, room: int) -> LaunchLog:
    """The stamps in a buffer of ``buffer_bytes(ctas, room)`` bytes, after the launch has ended.

    Those that found no room are announced.

    Raises:
        DeviceError: a role has not written its start and its end.
    """
    kind = np.dtype([("header", HEADER), ("stamps", RAW, (room,))])
    roles = np.frombuffer(raw, dtype=kind, count=ctas * len(ROLES))
    headers = roles["header"]
    if (headers["start_ns"] == 0).any() or (headers["end_ns"] < headers["start_ns"]).any():
        raise DeviceError(
            f"kernel {source.name} has not written all of its stamps", "read them after a launch has ended; report this"
        )
    origin = int(headers["start_ns"].min())
    made = (_role(roles[k], *divmod(k, len(ROLES)), origin, room) for k in range(len(roles)))
    found = LaunchLog(source, rows, origin, tuple(made))
    if found.dropped:
        log.warning(
            "%d stamps of %s found no room in %d MiB: its timeline has gaps. Remedy: fewer rows",
            found.dropped,
            source.name,
            MOST_BYTES >> 20,
        )
    return found


def _role(record: np.void, cta: int, role: int, origin: int, room: int) -> RoleLog:
    header, count = record["header"], int(record["header"]["stamps"])
    stamps = record["stamps"][: min(count, room)]
    start, end = int(header["start_ns"]) - origin, int(header["end_ns"]) - origin
    first, clocks = int(header["start_clock"]), int(header["end_clock"]) - int(header["start_clock"])
    ns_a_clock = (end - start) / clocks if clocks else 0.0
    at = start + (stamps["clock"].astype(np.int64) - first) * ns_a_clock
    kinds, queues = (stamps["event"] & 0xFF).tolist(), (stamps["event"] >> 8).tolist()
    values = stamps["value"].astype(np.int64)
    begun = [k for k, kind in enumerate(kinds) if kind < Event.NO_WEIGHTS]
    times, took, tiles = at.tolist(), (values * ns_a_clock).tolist(), values.astype(np.uint32).view(np.int32).tolist()
    # Every activity ends where another begins, idleness at the latest: one without an end lost it to want of room.
    activities = tuple(
        Stamp(Event(kinds[k]), tiles[k], times[k], times[after])
        for k, after in pairwise(begun)
        if kinds[k] != Event.IDLE
    )
    waits = tuple(
        Stamp(Event(kind), queues[k], times[k] - took[k], times[k])
        for k, kind in enumerate(kinds)
        if kind >= Event.NO_WEIGHTS
    )
    return RoleLog(cta, role, int(header["sm"]), float(start), float(end), activities, waits, max(0, count - room))
