"""A reproduction as text for a terminal and as an HTML page."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilestream.report.page import Page, Section, write
from tilestream.report.page import Table as PageTable
from tilestream.studies.flashfuser.reproduce import Reproduction
from tilestream.studies.flashfuser.tables import NOT, numeric, tables


def text(made: Reproduction) -> RenderableType:
    """Every table, and the paper's contradictions."""
    data = made.json()
    parts: list[RenderableType] = [Text(f"FlashFuser on {made.device}", style="bold")]
    for _, title, says, columns, cells in tables(data):
        shown = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for index, heading in enumerate(columns):
            shown.add_column(heading, justify="right" if index and numeric(cells, index) else "left", overflow="fold")
        for line in cells:
            shown.add_row(*line)
        parts += [Text(title, style="bold"), *([Text(says)] if says else []), shown if cells else Text(f"{NOT}\n")]
    parts += [Text("Where the paper contradicts itself", style="bold")]
    parts += [Text(f"- {line}") for line in data["inconsistent"]]
    return Group(*parts)


def page(made: Reproduction) -> Page:
    """The HTML report."""
    data = made.json()
    sections = [
        Section(
            title,
            (says,) if says else (),
            (),
            (PageTable(columns, cells, [c for i, c in enumerate(columns) if numeric(cells, i)]),),
        )
        for _, title, says, columns, cells in tables(data)
    ]
    pipelines = [
        ["" if number else w["key"], line.strip()]
        for w in data["workloads"]
        if "ours" in w
        for number, line in enumerate(w["ours"]["pipeline"].splitlines())
    ]
    sections.append(Section("The chosen kernels as pipelines", (), (), (PageTable(("", "pipeline"), pipelines),)))
    sections.append(Section("Where the paper contradicts itself", data["inconsistent"]))
    exact = sum(s["agrees"] for s in data["rules"])
    held = [s for s in data["model"] if s["held_out"]]
    cards = [(f"{exact} of {len(data['rules'])}", "counts of the search space reproduced")]
    cards += [(f"{a['with L2']:.2f}x", f"over two kernels, by the model, {a['over']}") for a in data["ablation"]]
    if held:
        cards.append((f"{sum(s['error'] for s in held) / len(held):.1%}", "mean error of the model, held-out shapes"))
    cards.append((f"{made.seconds:.0f} s", "to reproduce"))
    subtitle = f"On {made.device}, against arXiv 2512.12949v1 (HPCA 2026)"
    return Page(
        "FlashFuser's evaluation, reproduced", subtitle, cards, sections, "Made by tilestream reproduce flashfuser."
    )


def save(folder: Path, made: Reproduction) -> Path:
    """Write the report into ``folder``; returns its path."""
    return write(folder / "flashfuser.html", page(made))
