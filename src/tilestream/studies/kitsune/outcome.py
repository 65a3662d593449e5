"""What a simulated execution of a whole model came to, as plain data: times, utilisation, bytes, regions.

Nothing here simulates: ``evaluate`` does, and processes of a sweep send these back.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

LOW = 1 / 3
"""Below this share of its peak a resource counts as low (Kitsune, section 1)."""


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

    @property
    def sm(self) -> float:
        """The busiest pipe of the SMs."""
        return max(self.busy.get("tensor", 0.0), self.busy.get("simt", 0.0))


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

    def quadrants(self) -> Quadrants:
        total = math.fsum(x.seconds for x in self.launches)
        shares = dict.fromkeys(((True, True), (False, True), (True, False), (False, False)), 0.0)
        for launch in self.launches:
            shares[launch.sm < LOW, launch.busy.get("dram", 0.0) < LOW] += launch.seconds / total
        return Quadrants(shares[True, True], shares[False, True], shares[True, False], shares[False, False])

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
            found.append(Region(launch.name, ops, launch.phase, bulk_s, launch.seconds))
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
