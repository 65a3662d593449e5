"""A run of a pipeline as its stamps tell it: what every warpgroup and loader warp did when, and what it waited for.

The names are the simulator's (``simulator.Span``), so that the two timelines can be laid side by side: a step is called
after its stage, a wait after the tile that was not there, after the queue that was full, or after what else it was for.
A consumer sees only that its rows are late. Why, its loader's stamps say: while that waited at an empty queue, so did
the consumer; the rest is memory.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import gcd

from tilestream.cuda.stamps import Event, LaunchLog, RoleLog, Stamp
from tilestream.errors import InputError
from tilestream.ir.pipeline import Pipeline, Residency, Stage

STEP, DETAIL, WAIT = "step", "detail", "wait"
ACTIVITIES = {
    Event.PRODUCT: "product",
    Event.EPILOGUE: "epilogue",
    Event.LOAD_WEIGHTS: "load weights",
    Event.LOAD_ROWS: "load rows",
    Event.STORE_TILE: "store",
}
WAITS = {
    Event.NO_WEIGHTS: "weights",
    Event.NO_ROWS: "memory",
    Event.NO_STAGING: "stores",
    Event.WEIGHTS_AHEAD: "room for weights",
    Event.ROWS_AHEAD: "room for rows",
    Event.NOTHING_STAGED: "nothing to store",
}
"""What waits are for, but for those at queues, which are named after their tiles. ``memory`` is L2 or DRAM: a kernel
cannot tell which; ``stores`` is staging memory that earlier stores have not yet left."""

CONSUMERS = 2
ROWS_LOADER, SECOND_PUBLISHER, PUBLISHER = 3, 2, 5
"""Roles that load the first warpgroup's rows and that store tiles, as ``loader_warp`` in ``roles.cuh`` has them."""


@dataclass(frozen=True, slots=True)
class Slice:
    """What one role of one CTA did from ``start_us`` to ``end_us``.

    ``kind`` is ``step`` (a tile by a consumer warpgroup), ``detail`` (a part of one, or a loader's work) or ``wait``;
    ``reason`` of a consumer's wait is ``queue``, ``room``, ``weights``, ``memory`` or ``stores``. Tiles behind the last
    one pad the last step. Slices of a role nest.
    """

    launch: int
    stage: str
    replica: int
    worker: int
    sm: int
    role: int
    kind: str
    name: str
    tile: int
    start_us: float
    end_us: float
    reason: str = ""


@dataclass(frozen=True)
class Recording:
    """A measured run.

    ``time_us`` is a call's time without stamps, ``stamped_us`` with them; ``launches_us`` are the stamped launches'
    own times, each from the end of the one before it, which add up to ``stamped_us``. Times of slices are from the
    start of the call. ``clock_ns`` is the tick of the GPU's common clock: two SMs may seem that far apart.
    ``dropped`` stamps found no room. Launches of the host build have no time without stamps: it is zero.
    """

    pipeline: str
    device: str
    rows: int
    time_us: float
    stamped_us: float
    launches_us: tuple[float, ...]
    slices: tuple[Slice, ...]
    clock_ns: int
    dropped: int

    @property
    def overhead(self) -> float:
        """What the stamps cost, as a share of the time without them."""
        return self.stamped_us / self.time_us - 1 if self.time_us else 0.0


def of_logs(
    pipeline: Pipeline, logs: Sequence[LaunchLog], device: str, time_us: float = 0.0, stamped_us: float | None = None
) -> Recording:
    """The recording that the logs of all launches of one call make. Without ``stamped_us`` the call begins with the
    first stamp; with it, as much earlier as the stamps leave of it: the time to launch."""
    if not logs:
        raise InputError(f"pipeline {pipeline.name!r} has left no stamps", "build it with stamped=True and call it")
    first_ns = min(log.origin_ns for log in logs)  # a launch may begin before the one in front has stamped
    offsets = [log.origin_ns - first_ns for log in logs]
    ends = [offset + log.end_ns for offset, log in zip(offsets, logs, strict=True)]
    inside_us = ends[-1] * 1e-3
    whole_us = max(inside_us, stamped_us or 0.0)
    lead_us = whole_us - inside_us
    slices: list[Slice] = []
    for number, (log, offset) in enumerate(zip(logs, offsets, strict=True)):
        slices += _launch(number, log, lead_us + offset * 1e-3)
    starts = [-lead_us * 1e3, *ends]
    launches_us = tuple((end - start) * 1e-3 for start, end in zip(starts, ends, strict=False))
    edges = [int(ns) for log in logs for role in log.roles for ns in (role.start_ns, role.end_ns)]
    return Recording(
        pipeline.name,
        device,
        logs[0].rows,
        time_us,
        whole_us,
        launches_us,
        tuple(sorted(slices, key=lambda s: (s.start_us, -s.end_us))),
        gcd(*edges),
        sum(log.dropped for log in logs),
    )


@dataclass(frozen=True)
class _Track:
    """One role of one CTA on the timeline of the call."""

    launch: int
    stage: Stage
    replica: int
    role: RoleLog
    offset_us: float

    def slice(self, kind: str, name: str, tile: int, start_ns: float, end_ns: float, reason: str = "") -> Slice:
        r = self.role
        start_us, end_us = (self.offset_us + ns * 1e-3 for ns in (start_ns, end_ns))
        return Slice(
            self.launch, self.stage.name, self.replica, r.cta, r.sm, r.role, kind, name, tile, start_us, end_us, reason
        )


def _launch(number: int, log: LaunchLog, offset_us: float) -> Iterator[Slice]:
    """The slices of one launch whose first stamp is at ``offset_us``."""
    queues = [q.tile for q in log.source.tables.queues]
    for cta, group in groupby(log.roles, key=lambda r: r.cta):
        roles = tuple(group)
        stage, replica = _worker(log, cta)
        for role in roles:
            track = _Track(number, stage, replica, role, offset_us)
            if role.role < CONSUMERS:
                yield from _steps(track)
            for a in role.activities:
                yield track.slice(DETAIL, ACTIVITIES[a.event], a.of, a.start_ns, a.end_ns)
            yield from _waits(track, roles, queues)


def _worker(log: LaunchLog, cta: int) -> tuple[Stage, int]:
    """The stage of a CTA, and which of its replicas it is."""
    stages = log.source.pipeline.stages
    first = 0
    for stage in stages[:-1]:
        if cta < first + stage.replicas:
            return stage, cta - first
        first += stage.replicas
    return stages[-1], cta - first


def _steps(track: _Track) -> Iterator[Slice]:
    """A consumer's tiles, each from the start of its first activity to the end of its last."""
    for tile, parts in groupby(track.role.activities, key=lambda a: a.of):
        done = tuple(parts)
        yield track.slice(STEP, track.stage.name, tile, done[0].start_ns, done[-1].end_ns)


def _waits(track: _Track, roles: Sequence[RoleLog], queues: Sequence[str]) -> Iterator[Slice]:
    """The waits of one role; a consumer's are split by what those that serve it waited for meanwhile."""
    role = track.role
    behind = {Event.NO_ROWS: Event.QUEUE_EMPTY, Event.NO_STAGING: Event.QUEUE_FULL}
    for wait in role.waits:
        tile = _tile_at(role.activities, wait.start_ns)
        causes = []
        if wait.event in behind:
            serving = roles[_serving(track, wait.event)]
            causes = [w for w in serving.waits if w.event is behind[wait.event]]
        for start, end, cause in _split(wait, causes):
            name, reason = _named(cause, queues)
            yield track.slice(WAIT, name, tile, start, end, reason if role.role < CONSUMERS else "")


def _serving(track: _Track, event: Event) -> int:
    """The role that brings a consumer its rows, or takes its results."""
    by_rows = track.stage.placement.dim == 0
    g = track.role.role
    if event is Event.NO_ROWS:
        return ROWS_LOADER + g if by_rows else ROWS_LOADER
    # With weights that stay, the loader of weights is soon free to publish.
    return SECOND_PUBLISHER if by_rows and track.stage.residency is Residency.RESIDENT and g == 1 else PUBLISHER


def _split(wait: Stamp, causes: Iterable[Stamp]) -> Iterator[tuple[float, float, Stamp]]:
    """A wait in parts: those during ``causes``, which are in order and apart, and the rest, which is its own."""
    at = wait.start_ns
    for cause in causes:
        start, end = max(at, cause.start_ns), min(wait.end_ns, cause.end_ns)
        if start >= end:
            continue
        if start > at:
            yield at, start, wait
        yield start, end, cause
        at = end
    if at < wait.end_ns:
        yield at, wait.end_ns, wait


def _named(wait: Stamp, queues: Sequence[str]) -> tuple[str, str]:
    """What a wait was for, and which kind of reason that is for a consumer."""
    if wait.event is Event.QUEUE_EMPTY:
        return queues[wait.of], "queue"
    if wait.event is Event.QUEUE_FULL:
        return f"{queues[wait.of]} full", "room"
    name = WAITS[wait.event]
    return name, name


def _tile_at(activities: Sequence[Stamp], ns: float) -> int:
    """The tile that a role was at, -1 before its first."""
    k = bisect_right(activities, ns, key=lambda a: a.start_ns)
    return activities[k - 1].of if k else -1
