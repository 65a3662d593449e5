"""Decode steps that are one kernel: their stages as text, and as rows of a table on a page."""

from __future__ import annotations

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tilestream.plan.analysis import Analysis
from tilestream.plan.whole import Launch
from tilestream.report.words import count, microseconds, size
from tilestream.simulator.steps import StepRun

HEADINGS = ("stage", "layers", "bytes a layer", "of them ahead", "hand-over us", "rows us", "us in all", "line")


def of(a: Analysis) -> list[tuple[Launch, StepRun]]:
    """The launches that are steps."""
    return [] if a.empty else [(launch, launch.step) for launch in a.whole.launches if launch.step is not None]


def title(launch: Launch, run: StepRun) -> str:
    """What a step is, in a line."""
    waits = count(sum(stage.hand_over_us > 0 for stage in run.stages), "hand-over")
    reads = size(run.bytes)
    return f"decode step {launch.name}: one kernel, {count(len(run.stages), 'stage')}, {waits}, {reads}"


def rows(run: StepRun) -> list[tuple[str, ...]]:
    """A row a stage, of all layers: ``HEADINGS``. Microseconds are means of a layer but for the sum."""
    made = []
    for stages in run.by_name():
        n = len(stages)
        us = (sum(s.hand_over_us for s in stages) / n, sum(s.rows_us for s in stages) / n, sum(s.us for s in stages))
        first, ahead = stages[0], sum(s.ahead for s in stages) / n
        cells = (size(first.bytes), size(round(ahead)), *map(microseconds, us))
        made.append((first.name, str(n), *cells, run.lines.get(first.name, "")))
    return made


def render(a: Analysis) -> list[RenderableType]:
    """A table of each step."""
    shown: list[RenderableType] = []
    for launch, run in of(a):
        table = Table(
            title=title(launch, run), title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
        )
        for heading in HEADINGS[:-1]:
            table.add_column(heading, justify="left" if heading == HEADINGS[0] else "right", no_wrap=True)
        for row in rows(run):
            table.add_row(*map(Text, row[:-1]))
        shown.append(table)
        shown += [Text(f"{name}: {line}", style="dim") for name, line in run.lines.items() if line]
        told = f"predicted {microseconds(run.time_us)} us, {microseconds(run.launch_us)} us of them the launch"
        shown.append(Text(f"{told}; weights come ahead while a stage waits for what others computed", style="dim"))
    return shown
