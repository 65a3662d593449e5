"""A reproduction as text for a terminal and as an HTML page with its pictures."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilestream.report.page import Page, Picture, Section, write
from tilestream.report.page import Table as PageTable
from tilestream.studies.kitsune import paper, pictures
from tilestream.studies.kitsune.outcome import geomean
from tilestream.studies.kitsune.reproduce import COLUMNS, Reproduction
from tilestream.studies.kitsune.summary import BASE, EXECUTIONS_SHOWN, RowRuns

HEADINGS = (
    "row",
    "operators",
    "fused: VF",
    "Kitsune",
    "traffic saved: VF %",
    "Kitsune %",
    "speedup: VF",
    "Kitsune",
)
NUMBERS = HEADINGS[1:]


def text(made: Reproduction) -> RenderableType:
    """Table 2, the figures of the text and the reasons, each value of ours beside the paper's."""
    data = made.json()
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, heading in enumerate(HEADINGS):
        table.add_column(heading, justify="right" if index else "left", no_wrap=not index)
    for cells in _table2(data):
        table.add_row(*cells)
    figures = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("figure", "paper", "ours", ""):
        figures.add_column(heading)
    for f in data["figures"]:
        figures.add_row(f["what"], f["paper"], _ours(f), "" if f["agrees"] or f["paper"] == "bars only" else "differs")
    whys = _whys(data)
    return Group(
        Text(f"Kitsune on {made.device}: Table 2. Ours, and in brackets the paper's.", style="bold"),
        table,
        Text("Figures of the text", style="bold"),
        figures,
        *([Text("Why they differ", style="bold")] if whys else []),
        *(Text(f"{what}: {why}") for what, why in whys),
    )


def page(made: Reproduction, drawn: dict[str, bytes]) -> Page:
    """The HTML report; ``drawn`` are the pictures by name."""
    data = made.json()
    by_mode = {m: [r.speedup() for r in made.rows if r.mode == m] for m in (paper.INFERENCE, paper.TRAINING)}
    cards = [(f"{geomean(v):.2f}x", f"{mode}, geomean over bulk") for mode, v in by_mode.items() if v]
    cards += [(str(len(made.rows)), "rows of Table 2"), (f"{made.seconds:.0f} s", "to reproduce")]

    def shown(*names: str) -> list[Picture]:
        return [Picture(drawn[n], pictures.ALT[n]) for n in names if n in drawn]

    figures = [[f["what"], f["source"], f["paper"], _ours(f), f["why"]] for f in data["figures"]]
    sections = [
        Section(
            "Table 2",
            ("Operators, how many are fused, and the off-chip traffic that fusion saves. Ours (the paper's).",),
            shown("traffic"),
            (PageTable(HEADINGS, _table2(data), NUMBERS), PageTable(("what", "why it differs"), _whys(data))),
        ),
        Section("Speed", ("Simulated time over that of one kernel an operator.",), shown("speedup", "regions")),
        Section(
            "Utilisation",
            ("A resource is low in a launch if it is below a third of its peak there, averaged over the launch.",),
            shown("utilisation", "timeline"),
            (PageTable(RUN_COLUMNS, list(_runs(made.rows)), RUN_COLUMNS[2:]),),
        ),
        Section("Sensitivity", (), shown("sensitivity")),
        Section(
            "Every figure of the text",
            (),
            (),
            (PageTable(("figure", "section", "paper", "ours", "why they differ"), figures, ("paper", "ours")),),
        ),
        Section("Regions", (), (), (_region_table(data),)),
    ]
    subtitle = f"Simulated on {made.device}, against the published figures (arXiv 2502.18403v1 and ACM TACO 22(4))"
    return Page("Kitsune's evaluation, reproduced", subtitle, cards, sections, "Made by tilestream reproduce kitsune.")


def save(folder: Path, made: Reproduction) -> Path:
    """Write the report, and each picture beside it; returns the report's path."""
    drawn = pictures.pictures(made)
    folder.mkdir(parents=True, exist_ok=True)
    for name, png in drawn.items():
        (folder / f"{name}.png").write_bytes(png)
    return write(folder / "kitsune.html", page(made, drawn))


def _table2(data: dict[str, Any]) -> list[list[str]]:
    made = []
    for row in data["rows"]:
        stated = row["paper"]
        cells = [row["label"]]
        for name in COLUMNS:
            digits = 2 if name.startswith("traffic") else 0
            cells.append(f"{row[name]:.{digits}f} ({stated[name]:.{digits}f})")
        made.append([*cells, f"{row['speedup_vertical']:.2f}", f"{row['speedup']:.2f}"])
    return made


def _ours(f: dict[str, Any]) -> str:
    low, high = f["ours"]
    return paper.span_text(low, high, f["unit"])


def _whys(data: dict[str, Any]) -> list[tuple[str, str]]:
    named = [(row["label"], row["why"]) for row in data["rows"]]
    return [(what, why) for what, why in (*named, *((f["what"], f["why"]) for f in data["figures"])) if why]


RUN_COLUMNS = ("row", "execution", "µs", "launches", "tensor %", "SIMT %", "L2 %", "DRAM %", "both low %", "DRAM MB")


def _runs(rows: Iterable[RowRuns]) -> Iterable[list[str]]:
    labels = {r.key: r.label for r in paper.TABLE2}
    for row in rows:
        for execution in EXECUTIONS_SHOWN:
            run = row.runs[BASE, execution]
            busy = run.busy()
            yield [
                labels[row.key],
                execution,
                f"{run.time_s * 1e6:,.1f}",
                str(len(run.launches)),
                *(f"{100 * busy[what]:.0f}" for what in ("tensor", "simt", "l2", "dram")),
                f"{100 * run.quadrants().both_low:.0f}",
                f"{run.dram_bytes / 1e6:,.1f}",
            ]


def _region_table(data: dict[str, Any]) -> PageTable:
    columns = ("app", "mode", "phase", "operators", "bulk µs", "Kitsune µs", "speedup")
    rows = [
        [
            r["app"],
            r["mode"],
            r["phase"],
            ", ".join(r["ops"]),
            f"{r['bulk_us']:,.1f}",
            f"{r['kitsune_us']:,.1f}",
            f"{r['speedup']:.2f}",
        ]
        for r in data["regions"]
    ]
    return PageTable(columns, rows, columns[4:])
