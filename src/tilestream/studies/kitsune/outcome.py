"""What a simulated execution of a whole model came to, as plain data: times, utilisation, bytes, regions.

Nothing here simulates: ``evaluate`` does, and processes of a sweep send these back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

BOUND = 2 / 3
"""From this share of its peak on a resource is what limits a launch."""
LOW = 1 / 3
"""Below this share of its peak a resource counts as low (Kitsune, section 1)."""
PIPES = ("tensor", "simt")
"""What of an SM can be busy."""


@dataclass(frozen=True)
class StageTime:
    """A stage of a launch: CTAs, seconds from the launch's start to its end, and what each CTA did, in seconds.

    ``waits`` are by reason, as ``simulator.StageRun`` has them; they and ``busy_s`` are means over the CTAs.
    """

    name: str
    engine: str
    ops: tuple[str, ...]
    ctas: int
    tiles: int
    end_s: float
    busy_s: float
    waits: Mapping[str, float]


@dataclass(frozen=True)
class LaunchTime:
    """One launch: when it ran, in seconds, which operators it stands for, and the mean share of each resource.

    ``busy`` has ``tensor``, ``simt``, ``dram`` and ``l2``, each 0 to 1 over the whole launch, as a profiler reports
    a kernel. ``phase`` is ``forward`` or ``backward``. ``bytes`` are those of ``l2`` and ``dram``.
    """

    name: str
    ops: tuple[str, ...]
    phase: str
    start_s: float
    seconds: float
    busy: Mapping[str, float]
    stages: tuple[StageTime, ...] = ()
    bytes: Mapping[str, float] = field(default_factory=dict)

    @property
    def waits(self) -> dict[str, float]:
        """Seconds by what the stages waited for, summed over CTAs."""
        found: dict[str, float] = {}
        for stage in self.stages:
            for why, seconds in stage.waits.items():
                found[why] = found.get(why, 0.0) + seconds * stage.ctas
        return found

    def sm(self, pipes: Sequence[str] = PIPES) -> float:
        """The busiest of these pipes of the SMs."""
        return max(self.busy.get(pipe, 0.0) for pipe in pipes)

    @property
    def limit(self) -> str:
        """What keeps the launch from being faster: a resource that is busy most of the time, or what its CTAs wait for.

        ``tensor``, ``simt``, ``l2``, ``dram``; a reason of ``StageTime.waits``; ``steps`` where CTAs work on tiles most
        of the time with no pipe busy: the parts of a step that nothing covers.
        """
        what = max(self.busy, key=lambda name: self.busy[name], default="")
        if what and self.busy[what] >= BOUND:
            return what
        waits = self.waits
        why = max(waits, key=lambda name: waits[name], default="")
        working = math.fsum(s.busy_s * s.ctas for s in self.stages)
        return why if why and waits[why] > working else "steps"


@dataclass(frozen=True)
class Quadrants:
    """Shares of the run time, which add up to 1: which of SM and DRAM are below a third of their peak."""

    both_low: float
    only_dram_low: float
    only_sm_low: float
    neither: float


@dataclass(frozen=True)
class Region:
    """Operators that one Kitsune launch runs together, against the same operators as bulk kernels."""

    name: str
    ops: tuple[str, ...]
    phase: str
    bulk_s: float
    seconds: float
    limit: str = ""

    @property
    def speedup(self) -> float:
        return self.bulk_s / self.seconds


@dataclass(frozen=True)
class Outcome:
    """One model, executed one way, on one device. ``dram_bytes`` is the simulated traffic off the chip."""

    app: str
    mode: str
    device: str
    execution: str
    time_s: float
    launches: tuple[LaunchTime, ...]
    dram_bytes: float
    l2_bytes: float
    events: int
    utilisation: tuple[tuple[float, float, Mapping[str, float]], ...] = ()

    def quadrants(self, pipes: Sequence[str] = PIPES) -> Quadrants:
        """By launch, as a profiler reports kernels: what is busy is averaged over each launch. ``pipes``: what counts
        as the SM."""
        total = math.fsum(x.seconds for x in self.launches)
        shares = dict.fromkeys(((True, True), (False, True), (True, False), (False, False)), 0.0)
        for launch in self.launches:
            shares[launch.sm(pipes) < LOW, launch.busy.get("dram", 0.0) < LOW] += launch.seconds / total
        return Quadrants(shares[True, True], shares[False, True], shares[True, False], shares[False, False])

    def both_low_at_once(self) -> float:
        """Share of the time in which SM and DRAM are both low, moment by moment, whatever launch runs."""
        low = total = 0.0
        for start, end, busy in self.utilisation:
            total += end - start
            if max(busy.get(pipe, 0.0) for pipe in PIPES) < LOW and busy.get("dram", 0.0) < LOW:
                low += end - start
        return low / total if total else 0.0

    def phase_s(self, phase: str) -> float:
        return math.fsum(x.seconds for x in self.launches if x.phase == phase)

    def waits(self) -> dict[str, float]:
        """Seconds that stages waited, by reason, over all launches and CTAs."""
        found: dict[str, float] = {}
        for launch in self.launches:
            for why, seconds in launch.waits.items():
                found[why] = found.get(why, 0.0) + seconds
        return found

    def busy(self) -> dict[str, float]:
        """Mean share of each resource over the run."""
        return {
            what: math.fsum(x.busy.get(what, 0.0) * x.seconds for x in self.launches) / self.time_s
            for what in ("tensor", "simt", "l2", "dram")
        }

    def json(self) -> dict[str, Any]:
        """Without launches and time series, which the pictures show."""
        return {
            "app": self.app,
            "mode": self.mode,
            "device": self.device,
            "execution": self.execution,
            "time_us": self.time_s * 1e6,
            "dram_bytes": self.dram_bytes,
            "l2_bytes": self.l2_bytes,
            "launches": len(self.launches),
            "events": self.events,
            "busy": self.busy(),
            "waits_us": {why: s * 1e6 for why, s in self.waits().items()},
            "quadrants": asdict(self.quadrants()),
        }


def regions(bulk: Outcome, kitsune: Outcome) -> tuple[Region, ...]:
    """Launches of ``kitsune`` that stand for more than one operator, each beside its bulk kernels."""
    alone: dict[str, float] = {}
    for launch in bulk.launches:
        for op in dict.fromkeys(launch.ops):
            alone[op] = alone.get(op, 0.0) + launch.seconds / len(dict.fromkeys(launch.ops))
    found = []
    for launch in kitsune.launches:
        ops = tuple(dict.fromkeys(launch.ops))
        if len(ops) > 1:
            bulk_s = math.fsum(alone.get(op, 0.0) for op in ops)
            found.append(Region(launch.name, ops, launch.phase, bulk_s, launch.seconds, launch.limit))
    return tuple(found)


def fused_share(bulk: Outcome, parts: Iterable[Region], phase: str | None = None) -> float:
    """Share of the bulk time that operators of ``parts`` take, of one phase or of all."""
    total = bulk.time_s if phase is None else bulk.phase_s(phase)
    return math.fsum(r.bulk_s for r in parts if phase in (None, r.phase)) / total if total else 0.0


def geomean(values: Sequence[float]) -> float:
    """Geometric mean; NaN of nothing."""
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else math.nan


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan
