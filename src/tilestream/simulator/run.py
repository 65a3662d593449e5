"""Run a workload on a device: launch after launch, equal launches once."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from tilestream.devices import Device
from tilestream.errors import WorkloadError
from tilestream.simulator.launch import MOST_TILES, LaunchResult, Series, simulate
from tilestream.simulator.workload import SimLaunch, Workload

MOST_BINS = 512

Bin = tuple[float, float, dict[str, float]]
"""Of a series: start and end in seconds, and the share of each resource's rate."""


@dataclass(frozen=True)
class StageRun:
    """What a stage did in its launch. ``busy_s`` and ``waits`` are seconds summed over its CTAs.

    ``waits`` says what CTAs stood still for: ``launch``, ``weights`` (what they load once), ``queue`` (no tile there),
    ``room`` (no room in a queue), ``dram``, ``l2``, ``pipe`` (another CTA of the SM had it).
    """

    name: str
    busy_s: float
    end_s: float
    waits: dict[str, float]
    ops: tuple[str, ...] = ()


@dataclass(frozen=True)
class LaunchRun:
    """One launch: seconds from the start of the run, and mean shares of each resource's rate while it ran.

    ``busy`` has "tensor" and "simt" (means over the SMs), "dram" and "l2". ``bytes`` are those of each level.
    """

    name: str
    start_s: float
    end_s: float
    busy: dict[str, float]
    bytes: dict[str, float]
    stages: tuple[StageRun, ...]

    @property
    def seconds(self) -> float:
        return self.end_s - self.start_s


@dataclass(frozen=True)
class Run:
    """Outcome of a workload on a device.

    ``utilisation`` is a series of (start_s, end_s, share of the rate of each resource). ``events`` and ``tiles`` were
    simulated one by one; ``exact`` is False where long launches had their tiles joined in groups for that.
    """

    workload: str
    device: str
    time_s: float
    launches: tuple[LaunchRun, ...]
    utilisation: Series
    bytes: dict[str, float]
    flops: float
    busy: dict[str, float]
    events: int
    tiles: int
    exact: bool


def run(workload: Workload, device: Device, *, arbiter: str | None = None, most_tiles: int = MOST_TILES) -> Run:
    """Simulate ``workload`` on ``device``.

    Args:
        arbiter: "single" or "dual"; None means the device's own.
        most_tiles: launches with more tiles have them joined in groups, so that about this many are left.

    Raises:
        WorkloadError: a launch cannot be resident, or cannot come to its end.
    """
    arbiters = {None: device.arbiters, "single": 1, "dual": 2}.get(arbiter)
    if arbiters is None:
        raise WorkloadError(f"arbiter is {arbiter!r}", "use 'single', 'dual' or None for the device's own")
    if most_tiles < 1:
        raise WorkloadError(f"most_tiles is {most_tiles}", "use a number above 0")
    known: dict[SimLaunch, LaunchResult] = {}
    launches: list[LaunchRun] = []
    ran: list[LaunchResult] = []
    now, events, tiles = 0.0, 0, 0
    exact = True
    for launch in workload.launches:
        key = _anonymous(launch)
        found = known.get(key)
        if found is None:
            try:
                found = simulate(key, device, arbiters, most_tiles)
            except WorkloadError:
                simulate(launch, device, arbiters, most_tiles)  # once more, with the names for the message
                raise
            known[key] = found
            events, tiles = events + found.events, tiles + found.tiles
        exact = exact and found.coarse == 1
        launches.append(_launch(launch, found, now))
        ran.append(found)
        now += found.seconds
    total = {level: sum(r.bytes[level] for r in launches) for level in ("dram", "l2")}
    busy = {
        name: sum(r.busy[name] * r.seconds for r in launches) / now if now else 0.0
        for name in ("tensor", "simt", "dram", "l2")
    }
    return Run(
        workload.name,
        device.name,
        now,
        tuple(launches),
        joined(_series(launches, ran, now / MOST_BINS), now, MOST_BINS),
        total,
        sum(known[_anonymous(r)].bytes.flops for r in workload.launches),
        busy,
        events,
        tiles,
        exact,
    )


def _anonymous(launch: SimLaunch) -> SimLaunch:
    """The launch by its numbers alone, so that equal ones are found."""
    names = {s.name: f"s{i}" for i, s in enumerate(launch.stages)}
    return replace(
        launch,
        name="",
        stages=tuple(replace(s, name=names[s.name], ops=(), source="") for s in launch.stages),
        queues=tuple(
            replace(q, producer=names[q.producer], consumers=tuple(names[c] for c in q.consumers))
            for q in launch.queues
        ),
    )


def _launch(launch: SimLaunch, found: LaunchResult, start: float) -> LaunchRun:
    stages = tuple(
        StageRun(stage.name, busy, end, dict(waits), stage.ops)
        for stage, busy, end, waits in zip(
            launch.stages, found.stage_busy_s, found.stage_end_s, found.waits, strict=True
        )
    )
    shares = {name: seconds / found.seconds if found.seconds else 0.0 for name, seconds in found.busy_s.items()}
    levels = {"dram": found.bytes.dram, "l2": found.bytes.l2}
    return LaunchRun(launch.name, start, start + found.seconds, shares, levels, stages)


def _series(launches: Iterable[LaunchRun], ran: Iterable[LaunchResult], least: float) -> Iterator[Bin]:
    """Of all launches; one bin of a launch that is no longer than ``least`` seconds."""
    for launch, found in zip(launches, ran, strict=True):
        if launch.seconds <= least:
            yield launch.start_s, launch.end_s, launch.busy
        else:
            yield from ((launch.start_s + start, launch.start_s + stop, shares) for start, stop, shares in found.bins)


def joined(series: Iterable[Bin], end: float, most: int) -> Series:
    """The series with bins joined so that there are at most about ``most``; shares are weighted by time."""
    least = end / most
    made: list[Bin] = []
    for start, stop, shares in series:
        if made and stop - made[-1][0] <= least:
            first, middle, before = made[-1]
            whole = stop - first
            shares = {
                name: (before[name] * (middle - first) + share * (stop - start)) / whole
                for name, share in shares.items()
            }
            made[-1] = (first, stop, shares)
        else:
            made.append((start, stop, shares))
    return tuple(made)
