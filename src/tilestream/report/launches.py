"""The launches of a whole model in order, as text."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from tilestream.plan.analysis import Analysis
from tilestream.plan.whole import Launch
from tilestream.report.words import microseconds, shortened, size

MOST = 40
"""Launches that are shown; the JSON has all."""


def render(a: Analysis) -> list[RenderableType]:
    """A table of the launches; nothing where there are none, or one region is all there is."""
    if a.empty or len(a.whole.launches) < 2:
        return []
    found = a.whole.launches
    table = Table(
        title="launches in order", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False
    )
    for heading in ("", "launch", "operators", "modules"):
        table.add_column(heading, overflow="fold")
    for heading in ("predicted us", "measured us", "DRAM"):
        table.add_column(heading, justify="right", no_wrap=True)
    for launch in found[:MOST]:
        table.add_row(*map(Text, cells(launch)), style="bold green" if launch.ours else "")
    left = found[MOST:]
    if not left:
        return [table]
    us = sum(launch.predicted_us for launch in left)
    return [table, Text(f"and {len(left)} more, {microseconds(us)} us in all; --json has them", style="dim")]


def cells(launch: Launch) -> tuple[str, ...]:
    """Who runs it, its name, its operators, the modules that it belongs to, microseconds, bytes."""
    who = launch.strategy if launch.kind == "pipeline" else "kernel" if launch.ours else "library"
    return (
        who,
        launch.name,
        operators(launch),
        shortened(launch.modules, 2),
        microseconds(launch.predicted_us),
        microseconds(launch.measured_us),
        size(round(launch.bytes)),
    )


def operators(launch: Launch, most: int = 4) -> str:
    """``addmm, relu x2``: what a reader knows the operators as."""
    words = counted(launch.operators)
    return ", ".join(words[:most]) + (f" and {len(words) - most} more" if len(words) > most else "")


def counted(names: Sequence[str]) -> list[str]:
    """Operators by their short names, equal ones counted."""
    counts = Counter(name.removeprefix("aten.").removeprefix("tilestream.").split(".")[0] for name in names)
    return [name if n == 1 else f"{name} x{n}" for name, n in counts.items()]
