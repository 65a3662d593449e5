"""Simulated executions of one whole model as an HTML page: times, resources over time, launches, stages and waits."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tilestream.report.page import Page, Picture, Section, Table, write
from tilestream.studies.kitsune import pictures
from tilestream.studies.kitsune.outcome import Outcome
from tilestream.studies.kitsune.sweep import Swept

MOST_LAUNCHES = 40
RUNS = ("execution", "µs", "speedup", "launches", "tensor %", "SIMT %", "L2 %", "DRAM %", "L2 MB", "DRAM MB")
LAUNCHES = ("launch", "operators", "phase", "µs", "tensor %", "SIMT %", "L2 %", "DRAM %", "L2 MB", "DRAM MB")
STAGES = ("pipeline", "stage", "engine", "operators", "CTAs", "tiles", "busy µs", "waits, µs a CTA")


def save(path: Path, made: Sequence[Swept]) -> Path:
    """Write the page of runs that are of one model on one device; returns ``path``."""
    return write(path, page(made))


def page(made: Sequence[Swept]) -> Page:
    """The page: all runs, then of each its longest launches and the stages of its pipelines."""
    point = made[0].point
    best = min(made, key=lambda s: s.outcome.time_s)
    cards = [(f"{1e6 * best.outcome.time_s:,.1f} µs", f"{best.point.execution}, the fastest")]
    cards += [(f"{s.speedup:.2f}x", f"{s.point.execution} over bulk") for s in made if s.speedup is not None]
    runs = {s.point.execution: s.outcome for s in made}
    drawn = Picture(pictures.png(pictures.timeline(runs)), "Busy share of each resource over time.")
    sections = [Section("Time", (), (drawn,), (Table(RUNS, [_run(s) for s in made], RUNS[1:]),))]
    for name, outcome in runs.items():
        tables = [Table(LAUNCHES, _launches(outcome), LAUNCHES[3:])]
        stages = _stages(outcome)
        if stages:
            tables.append(Table(STAGES, stages, STAGES[4:7]))
        sections.append(
            Section(name, (f"The {MOST_LAUNCHES} longest launches, and the stages of pipelines.",), (), tables)
        )
    sizes = "".join(f", {n}={v}" for n, v in point.sizes)
    subtitle = f"{point.mode} on {point.device}{sizes}"
    return Page(f"{point.app}, simulated", subtitle, cards, sections, "Made by tilestream simulate.")


def _run(s: Swept) -> list[str]:
    o = s.outcome
    speedup = "" if s.speedup is None else f"{s.speedup:.2f}"
    moved = [f"{o.l2_bytes / 1e6:,.1f}", f"{o.dram_bytes / 1e6:,.1f}"]
    return [s.point.execution, f"{1e6 * o.time_s:,.1f}", speedup, str(len(o.launches)), *_shares(o.busy()), *moved]


def _shares(busy) -> list[str]:
    return [f"{100 * busy.get(what, 0.0):.0f}" for what in ("tensor", "simt", "l2", "dram")]


def _launches(outcome: Outcome) -> list[list[str]]:
    longest = sorted(outcome.launches, key=lambda x: -x.seconds)[:MOST_LAUNCHES]
    return [
        [
            x.name,
            ", ".join(x.ops),
            x.phase,
            f"{1e6 * x.seconds:,.1f}",
            *_shares(x.busy),
            *(f"{x.bytes.get(level, 0.0) / 1e6:,.1f}" for level in ("l2", "dram")),
        ]
        for x in longest
    ]


def _stages(outcome: Outcome) -> list[list[str]]:
    return [
        [
            launch.name,
            stage.name,
            stage.engine,
            ", ".join(stage.ops),
            str(stage.ctas),
            f"{stage.tiles:,}",
            f"{1e6 * stage.busy_s:,.1f}",
            ", ".join(f"{why} {1e6 * s:,.1f}" for why, s in stage.waits.items() if s > 5e-8),
        ]
        for launch in sorted(outcome.launches, key=lambda x: -x.seconds)[:MOST_LAUNCHES]
        if len(launch.stages) > 1
        for stage in launch.stages
    ]
