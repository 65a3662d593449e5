"""``tilestream trace --measured`` as text and JSON: what was simulated beside what was recorded, stage by stage."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
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

NOTE = (
    "Microseconds of a mean SM of the stage, launch overhead included; they add up to the time of its launch. Measured "
    "by kernels with stamps, whose own cost is in these figures: the times above the tables say how much. work is "
    "steps without their waits; memory is a wait for the L2 or DRAM, which kernels cannot tell apart; end is after the "
    "last step, while other SMs still work."
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
    def error(self) -> float:
        """Of the simulated time, as a share of the measured one without stamps."""
        return self.run.outcome.time_us / self.recording.time_us - 1


@dataclass(frozen=True)
class Measurements:
    """All candidates of a model that were simulated and recorded, and why others were not."""

    runs: tuple[Measured, ...]
    problems: tuple[str, ...]

    @classmethod
    def of(cls, simulated: Simulation, progress: Callable[[str], None] = lambda _: None) -> Measurements:
        """Record every simulated candidate on the GPU present."""
        made = []
        stepped = steps.of(simulated.analysis)
        problems = [f"{launch.name}: not recorded: its kernel leaves no stamps" for launch, _ in stepped]
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
        return cls(tuple(made), tuple(problems))

    def recordings(self) -> dict[str, Recording]:
        """By title, as ``report.timeline`` takes them."""
        return {m.title: m.recording for m in self.runs}

    def __str__(self) -> str:
        return as_text(self)

    def __rich__(self) -> RenderableType:
        parts: list[RenderableType] = []
        for m in self.runs:
            parts += [Text(f"{m.title}: {_times(m)}", style="bold"), _table(m.stages)]
        parts += [Text(problem, style="yellow") for problem in self.problems]
        return Group(*parts, Text(NOTE, style="dim"))

    def json(self) -> list[dict[str, Any]]:
        return [
            {
                "region": m.run.region,
                "strategy": m.run.strategy,
                "rows": m.recording.rows,
                "device": m.recording.device,
                "predicted_us": m.run.outcome.time_us,
                "measured_us": m.recording.time_us,
                "stamped_us": m.recording.stamped_us,
                "overhead": m.recording.overhead,
                "error": m.error,
                "clock_ns": m.recording.clock_ns,
                "dropped_stamps": m.recording.dropped,
                "stages": [_facts(c) for c in m.stages],
            }
            for m in self.runs
        ]


def _times(m: Measured) -> str:
    r = m.recording
    dropped = f"; {r.dropped:,} stamps found no room, so that waits are missing" if r.dropped else ""
    return (
        f"simulated {microseconds(m.run.outcome.time_us)} us, measured {microseconds(r.time_us)} us ({m.error:+.0%}), "
        f"with stamps {microseconds(r.stamped_us)} us ({r.overhead:+.1%}){dropped}"
    )


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
