"""``tilestream trace --measured`` as text and JSON: what was simulated beside what was recorded, stage by stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilestream import cuda, devices
from tilestream.cuda.recording import Recording
from tilestream.errors import DeviceError, OptionError, TilestreamError
from tilestream.report import steps
from tilestream.report.accounts import KINDS, Comparison, compare
from tilestream.report.explain import as_text
from tilestream.report.simulation import Run, Simulation
from tilestream.report.words import microseconds
from tilestream.run.record import record
from tilestream.run.record_step import StageTimes, StepRecording, record_step
from tilestream.simulator.steps import StepRun

NOTE = (
    "Microseconds of a mean SM of the stage, launch overhead included; they add up to the time of its launch. Measured "
    "by kernels with stamps, whose own cost is in these figures: the times above the tables say how much. work is "
    "steps without their waits; memory is a wait for the L2 or DRAM, which kernels cannot tell apart; end is after the "
    "last step, while other SMs still work."
)
STEP_NOTE = (
    "A decode step has random weights, and its token is the last one of its cache. Medians over layers: a hand-over "
    "lasts until the last CTA has its first values, rows from a CTA's first values to its last word."
)


def device_here(named: str | None) -> str:
    """The name of the GPU present, for what is simulated beside a measurement.

    Raises:
        DeviceError: there is none that runs our kernels.
        OptionError: ``named`` is another.
    """
    if why := cuda.available():
        raise DeviceError(
            f"--measured runs kernels, and {why}", "run it on an H100 or H200; without --measured it needs no GPU"
        )
    here = devices.detect()
    if here is None or named not in (None, here.name):
        raise OptionError(f"--device {named} is not the GPU that --measured runs on", "leave --device out")
    return here.name


@dataclass(frozen=True)
class Measured:
    """One simulated candidate that also ran; ``str()`` of all is the text, ``json()`` plain data."""

    run: Run
    recording: Recording
    stages: tuple[Comparison, ...]

    @property
    def title(self) -> str:
        return f"{self.run.region} {self.run.strategy}"

    @property
    def simulated_us(self) -> float:
        return self.run.outcome.time_us


@dataclass(frozen=True)
class MeasuredStep:
    """A decode step that was predicted and ran."""

    name: str
    run: StepRun
    recording: StepRecording

    @property
    def simulated_us(self) -> float:
        return self.run.time_us

    def stages(self) -> Iterator[tuple[str, float, float, StageTimes]]:
        """By stage the hand-over and the rows that were predicted, means over layers, and what was measured."""
        times = self.recording.by_stage()
        for same in self.run.by_name():
            waits, takes = (sum(getattr(s, what) for s in same) / len(same) for what in ("hand_over_us", "rows_us"))
            if same[0].name in times:
                yield same[0].name, waits, takes, times[same[0].name]


@dataclass(frozen=True)
class Measurements:
    """All candidates of a model that were simulated and recorded, its decode steps, and why others were not."""

    runs: tuple[Measured, ...]
    problems: tuple[str, ...]
    steps: tuple[MeasuredStep, ...] = ()

    @classmethod
    def of(cls, simulated: Simulation, progress: Callable[[str], None] = lambda _: None) -> Measurements:
        """Record every simulated candidate on the GPU present."""
        made, stepped, problems = [], [], []
        for launch, step in steps.of(simulated.analysis):
            progress(f"recording {launch.name}")
            try:
                stepped.append(MeasuredStep(launch.name, step, record_step(step.shape)))
            except TilestreamError as failure:
                problems.append(f"{launch.name}: {failure}")
        for run in simulated.runs:
            if run.strategy == "bulk":
                problems.append(f"{run.region}, bulk: not recorded: library kernels leave no stamps")
                continue
            progress(f"recording {run.region}, {run.strategy}")
            try:
                recording = record(run.pipeline, run.outcome.rows)
                made.append(Measured(run, recording, compare(run.outcome, recording)))
            except TilestreamError as failure:
                problems.append(f"{run.region}, {run.strategy}: {failure}")
        return cls(tuple(made), tuple(problems), tuple(stepped))

    def recordings(self) -> dict[str, Recording]:
        """By title, as ``report.timeline`` takes them."""
        return {m.title: m.recording for m in self.runs}

    def step_recordings(self) -> dict[str, StepRecording]:
        """By name, as ``report.timeline`` takes them."""
        return {step.name: step.recording for step in self.steps}

    def __str__(self) -> str:
        return as_text(self)

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = []
        for m in self.runs:
            dropped = m.recording.dropped
            told = f"; {dropped:,} stamps found no room, so that waits are missing" if dropped else ""
            parts += [Text(f"{m.title}: {_times(m)}{told}", style="bold"), _table(m.stages)]
        for step in self.steps:
            parts += [
                Text(f"decode step {step.name}: {_times(step)}", style="bold"),
                _step_table(step),
            ]
        parts += [Text(problem, style="yellow") for problem in self.problems]
        if self.steps:
            parts.append(Text(STEP_NOTE, style="dim"))
        return Group(*parts, *([Text(NOTE, style="dim")] if self.runs else []))

    def json(self) -> list[dict[str, Any]]:
        return [*map(_step_facts, self.steps)] + [
            {
                "region": m.run.region,
                "strategy": m.run.strategy,
                "rows": m.recording.rows,
                **_figures(m),
                "clock_ns": m.recording.clock_ns,
                "dropped_stamps": m.recording.dropped,
                "stages": [_facts(c) for c in m.stages],
            }
            for m in self.runs
        ]


def _error(m: Measured | MeasuredStep) -> float:
    """Of the simulated time, as a share of the measured one without stamps."""
    return m.simulated_us / m.recording.time_us - 1


def _figures(m: Measured | MeasuredStep) -> dict[str, Any]:
    return {
        "device": m.recording.device,
        "predicted_us": m.simulated_us,
        "measured_us": m.recording.time_us,
        "stamped_us": m.recording.stamped_us,
        "overhead": m.recording.overhead,
        "error": _error(m),
    }


def _times(m: Measured | MeasuredStep) -> str:
    r = m.recording
    return (
        f"simulated {microseconds(m.simulated_us)} us, measured {microseconds(r.time_us)} us ({_error(m):+.0%}), "
        f"with stamps {microseconds(r.stamped_us)} us ({r.overhead:+.1%})"
    )


def _step_table(m: MeasuredStep) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in (
        "stage",
        "CTAs",
        "hand-over us: simulated",
        "measured",
        "rows us: simulated",
        "measured",
        "of the last",
    ):
        table.add_column(heading, justify="left" if heading == "stage" else "right")
    for name, waits, takes, found in m.stages():
        us = (waits, found.hand_over_us, takes, found.rows_us, found.most_rows_us)
        table.add_row(name, f"{found.ctas:.0f}", *(f"{each:.2f}" for each in us))
    return table


def _step_facts(m: MeasuredStep) -> dict[str, Any]:
    return {
        "region": m.name,
        "strategy": "decode step",
        **_figures(m),
        "stages": [
            {"stage": name, "simulated_us": {"hand_over_us": waits, "rows_us": takes}, "measured_us": asdict(found)}
            for name, waits, takes, found in m.stages()
        ],
    }


def _table(stages: tuple[Comparison, ...]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("stage", "SMs", "steps"):
        table.add_column(heading, justify="right" if heading != "stage" else "left")
    table.add_column("kind")
    for heading in ("simulated us", "measured us", "error us"):
        table.add_column(heading, justify="right")
    for c in stages:
        first = (c.measured.stage, f"{c.measured.ctas}", f"{c.measured.steps:.3g}")
        for kind in c.kinds:
            own = (c.simulated.us[kind], c.measured.us[kind], c.error_us(kind))
            table.add_row(*first, kind, f"{own[0]:.2f}", f"{own[1]:.2f}", f"{own[2]:+.2f}")
            first = ("", "", "")
            if kind == "work":
                for name, us in c.measured.parts_us.items():
                    table.add_row("", "", "", f"  {name}", "", f"{us:.2f}", "", style="dim")
        total = (c.simulated.total_us, c.measured.total_us)
        table.add_row("", "", "", "launch in all", f"{total[0]:.2f}", f"{total[1]:.2f}", f"{total[0] - total[1]:+.2f}")
        table.add_section()
    return table


def _facts(c: Comparison) -> dict[str, Any]:
    return {
        "launch": c.measured.launch,
        "stage": c.measured.stage,
        "sms": {"simulated": c.simulated.ctas, "measured": c.measured.ctas},
        "steps": {"simulated": c.simulated.steps, "measured": c.measured.steps},
        "work_measured_us": dict(c.measured.parts_us),
        "kinds": {
            kind: {
                "simulated_us": c.simulated.us[kind],
                "measured_us": c.measured.us[kind],
                "error_us": c.error_us(kind),
            }
            for kind in KINDS
        },
    }
