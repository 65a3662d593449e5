"""Where the time of a stage's SMs goes, as simulated and as recorded, and how far the two are apart.

The time of a launch is the same for all of its CTAs, so that what a stage's CTAs do and wait for adds up to it, and the
differences between two accounts of a stage add up to the difference of the two times.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from tilestream.cuda.recording import CONSUMERS, DETAIL, STEP, WAIT, Recording, Slice
from tilestream.errors import InputError
from tilestream.simulator import Simulation, Span

KINDS: tuple[str, ...] = ("launch", "work", "weights", "memory", "queue", "room", "stores", "pipe", "end")
"""``launch``: before the first step; ``work``: steps without their waits; waits for weights, for rows from L2 or DRAM,
for a tile in a queue, for room in one, for stores that still occupy the staging memory, for a pipe of the SM that
another CTA has; ``end``: after the last step, until the last CTA of the launch has ended."""

_T = TypeVar("_T", Span, Slice)
_SIMULATED = {"dram": "memory", "l2": "memory"}


@dataclass(frozen=True)
class Account:
    """One stage in one launch: mean microseconds of its CTAs that have steps, by kind. ``steps`` are a CTA's mean.

    ``parts_us`` are what ``work`` consists of, where that is known: products and epilogues, each without its waits.
    """

    launch: int
    stage: str
    ctas: int
    steps: float
    us: dict[str, float]
    parts_us: dict[str, float] = field(default_factory=dict)

    @property
    def total_us(self) -> float:
        return sum(self.us.values())


@dataclass(frozen=True)
class Comparison:
    """The same stage in both; errors are simulated minus measured."""

    simulated: Account
    measured: Account

    def error_us(self, kind: str) -> float:
        return self.simulated.us[kind] - self.measured.us[kind]

    @property
    def kinds(self) -> tuple[str, ...]:
        """Those of which there is anything to tell: a hundredth of a microsecond."""
        return tuple(k for k in KINDS if max(self.simulated.us[k], self.measured.us[k]) >= 0.01)


def compare(simulated: Simulation, measured: Recording) -> tuple[Comparison, ...]:
    """Stage by stage, in the order of the launches.

    Raises:
        InputError: they are not of the same pipeline and rows, not every step was simulated, or what was simulated
            are the kernels of libraries that a pipeline of strategy ``bulk`` stands for.
    """
    if (simulated.pipeline, simulated.rows) != (measured.pipeline, measured.rows):
        raise InputError(
            f"{simulated.pipeline!r} with {simulated.rows} rows was simulated, and {measured.pipeline!r} with "
            f"{measured.rows} measured",
            "simulate what was measured",
        )
    if not simulated.exact:
        raise InputError(f"the timeline has {simulated.note}", "compare with fewer rows")
    here, there = of_simulation(simulated), of_recording(measured)
    if here.keys() - there.keys():
        stages = ", ".join(f"{stage!r} of launch {launch}" for launch, stage in sorted(here.keys() - there.keys()))
        raise InputError(
            f"{measured.pipeline!r}: {stages} were simulated and not recorded",
            "simulate the kernels that were recorded: strategy 'bulk' stands for those of libraries",
        )
    return tuple(Comparison(account, there[key]) for key, account in here.items())


def of_simulation(run: Simulation) -> dict[tuple[int, str], Account]:
    """The accounts of every stage, by launch and name."""
    made = {}
    for (number, stage), spans in _grouped(run.spans).items():
        start_us, end_us = _interval(run.launches_us, number)
        ends: dict[int, float] = {}
        for span in spans:
            ends[span.worker] = max(ends.get(span.worker, 0.0), span.end_us)
        ctas = len(ends)
        us = dict.fromkeys(KINDS, 0.0)
        for why, waited in run.waits_us[stage].items():
            us[_SIMULATED.get(why, why)] += waited / ctas
        us["end"] = end_us - sum(ends.values()) / ctas
        us["work"] = end_us - start_us - sum(us.values())
        made[number, stage] = Account(number, stage, ctas, len(spans) / ctas, us)
    return made


def of_recording(run: Recording) -> dict[tuple[int, str], Account]:
    """The accounts of every stage, by launch and name: means over the consumer warpgroups."""
    made = {}
    for (number, stage), slices in _grouped(s for s in run.slices if s.role < CONSUMERS).items():
        start_us, end_us = _interval(run.launches_us, number)
        steps: dict[tuple[int, int], list[Slice]] = {}
        for s in slices:
            if s.kind == STEP:
                steps.setdefault((s.worker, s.role), []).append(s)
        us = dict.fromkeys(KINDS, 0.0)
        for s in slices:
            if s.kind == WAIT:
                us[s.reason] += (s.end_us - s.start_us) / len(steps)
        us["launch"] = sum(own[0].start_us - start_us for own in steps.values()) / len(steps)
        us["end"] = sum(end_us - own[-1].end_us for own in steps.values()) / len(steps)
        us["work"] = end_us - start_us - sum(us.values())
        mean = sum(len(own) for own in steps.values()) / len(steps)
        parts = {name: part / len(steps) for name, part in _parts(slices).items()}
        made[number, stage] = Account(number, stage, len({worker for worker, _ in steps}), mean, us, parts)
    return made


def _parts(slices: Iterable[Slice]) -> dict[str, float]:
    """Microseconds of all details by name, less the waits inside of them. Slices are in order of their start."""
    found: dict[str, float] = {}
    inside: dict[tuple[int, int], str] = {}
    for s in slices:
        own = (s.worker, s.role)
        if s.kind == DETAIL:
            inside[own] = s.name
            found[s.name] = found.get(s.name, 0.0) + s.end_us - s.start_us
        elif s.kind == WAIT and own in inside:
            found[inside[own]] -= s.end_us - s.start_us
    return found


def _interval(launches_us: tuple[float, ...], number: int) -> tuple[float, float]:
    start_us = sum(launches_us[:number])
    return start_us, start_us + launches_us[number]


def _grouped(found: Iterable[_T]) -> Mapping[tuple[int, str], list[_T]]:
    """Spans or slices by launch and stage."""
    made: dict[tuple[int, str], list[_T]] = {}
    for span in found:
        made.setdefault((span.launch, span.stage), []).append(span)
    return made
