"""A reproduction as text for a terminal and as an HTML page with its pictures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from tilestream import files
from tilestream.report.page import Page, Picture, Section, write
from tilestream.report.page import Table as PageTable
from tilestream.studies.kitsune import paper, pictures
from tilestream.studies.kitsune.outcome import geomean
from tilestream.studies.kitsune.reproduce import Reproduction
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
OTHERS = "Table 2 by other choices than ours. Ours, and in brackets the paper's."
OTHER_HEADINGS = ("row", "by another choice", *HEADINGS[2:])
LOW = "SM and DRAM both low, percent of the time, means of rows: by what may move it"
LOW_HEADINGS = ("", "inference: bulk", "Kitsune", "training: bulk", "Kitsune")


def text(made: Reproduction) -> RenderableType:
    """Table 2, the figures of the text and the reasons, each value of ours beside the paper's."""
    data = made.json()
    figures = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for heading in ("figure", "paper", "ours", ""):
        figures.add_column(heading)
    for f in data["figures"]:
        figures.add_row(f["what"], f["paper"], _ours(f), _mark(f))
    whys = _whys(data)
    return Group(
        Text(f"Kitsune on {made.device}: Table 2. Ours, and in brackets the paper's.", style="bold"),
        _shown(HEADINGS, _table2(data)),
        *([Text(OTHERS, style="bold"), _shown(OTHER_HEADINGS, cells)] if (cells := other_rows(data)) else []),
        Text("Figures of the text", style="bold"),
        figures,
        Text(MARKS, style="dim"),
        *([Text(LOW, style="bold"), _shown(LOW_HEADINGS, cells)] if (cells := low_rows(data)) else []),
        *([Text("Why they differ", style="bold")] if whys else []),
        *(Text(f"{what}: {why}") for what, why in whys),
    )


def _shown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table for a terminal, its numbers to the right."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    texts = headings.index(HEADINGS[2]) if HEADINGS[2] in headings else 1
    for index, heading in enumerate(headings):
        table.add_column(heading, justify="right" if index >= texts else "left", no_wrap=not index)
    for cells in rows:
        table.add_row(*cells)
    return table


MARKS = (
    f"near: outside of what the paper states by at most {paper.NEAR_POINTS:.0f} points of a percentage, or by "
    f"{paper.NEAR_SHARE:.0%} of a speedup. differs: further. No mark: within it, or none is stated."
)


def _mark(figure: Mapping[str, Any]) -> str:
    """How far ours is from the paper's, in a word; empty where it is within, or the paper states no number."""
    return "differs" if figure["near"] is False else "near" if figure["agrees"] is False else ""


def page(made: Reproduction, drawn: dict[str, bytes]) -> Page:
    """The HTML report; ``drawn`` are the pictures by name."""
    data = made.json()
    by_mode = {m: [r.speedup() for r in made.rows if r.mode == m] for m in (paper.INFERENCE, paper.TRAINING)}
    cards = [(f"{geomean(v):.2f}x", f"{mode}, geomean over bulk") for mode, v in by_mode.items() if v]
    cards += [(str(len(made.rows)), "rows of Table 2"), (f"{made.seconds:.0f} s", "to reproduce")]

    def shown(*names: str) -> list[Picture]:
        return [Picture(drawn[n], pictures.ALT[n]) for n in names if n in drawn]

    figures = [[f["what"], f["source"], f["paper"], _ours(f), _mark(f), f["why"]] for f in data["figures"]]
    sections = [
        Section("Speed", ("Simulated time over that of one kernel an operator.",), shown("speedup", "regions")),
        Section(
            "What limits the pipelines",
            (
                "Share of the time in Kitsune's pipelines by what keeps them from being faster: a resource that is "
                "busy at least two thirds of the time, or what CTAs stand still for; steps are parts of a tile's work "
                "that nothing covers.",
            ),
            (),
            (_limit_table(made.rows),),
        ),
        Section(
            "Utilisation",
            ("A resource is low in a launch if it is below a third of its peak there, averaged over the launch.",),
            shown("utilisation", "timeline"),
            (
                PageTable(RUN_COLUMNS, list(_runs(made.rows)), RUN_COLUMNS[2:]),
                PageTable((LOW, *LOW_HEADINGS[1:]), low_rows(data), LOW_HEADINGS[1:]),
            ),
        ),
        Section("Sensitivity", (), shown("sensitivity")),
        Section(
            "Table 2",
            ("Operators, how many are fused, and the off-chip traffic that fusion saves. Ours (the paper's).",),
            shown("traffic"),
            (
                PageTable(HEADINGS, _table2(data), NUMBERS),
                PageTable(OTHER_HEADINGS, other_rows(data), OTHER_HEADINGS[2:]),
            ),
        ),
        Section("Regions", (), (), (_region_table(data),)),
        Section(
            "Every figure of the text",
            (MARKS,),
            (),
            (PageTable(("figure", "section", "paper", "ours", "", "why"), figures, ("paper", "ours")),),
        ),
        Section("Why rows differ", (), (), (PageTable(("row", "why it differs"), _row_whys(data)),)),
    ]
    subtitle = f"Simulated on {made.device}, against the published figures (arXiv 2502.18403v1 and ACM TACO 22(4))"
    return Page("Kitsune's evaluation, reproduced", subtitle, cards, sections, "Made by tilestream reproduce kitsune.")


def save(folder: Path, made: Reproduction) -> Path:
    """Write the report, and each picture beside it; returns the report's path."""
    drawn = pictures.pictures(made)
    for name, png in drawn.items():
        files.write(folder / f"{name}.png", png)
    return write(folder / "kitsune.html", page(made, drawn))


def _table2(data: dict[str, Any]) -> list[list[str]]:
    return [[row["label"], *_cells(row, row["paper"], paper.COLUMNS)] for row in data["rows"]]


def other_rows(data: dict[str, Any]) -> list[list[str]]:
    """Rows of Table 2 by other choices, without the number of operators, which no choice changes."""
    columns = paper.COLUMNS[1:]
    return [
        [row["label"], other["what"], *_cells(other, row["paper"], columns)]
        for row in data["rows"]
        for other in row["others"]
    ]


def low_rows(data: dict[str, Any]) -> list[list[str]]:
    """The paper's percent of time with SM and DRAM both low, and ours by cause."""
    found = data["low"]
    if not found:
        return []
    stated = {f.key: f.low for f in paper.FIGURES}
    modes = (paper.INFERENCE, paper.TRAINING)
    lines = [["the paper", *(f"{stated[f'low_{who}_{mode}']:.0f}" for mode in modes for who in ("bulk", "kitsune"))]]
    for cause in dict.fromkeys(cause for of in found.values() for cause in of):
        lines.append([cause, *(_percent(found.get(mode, {}).get(cause), i) for mode in modes for i in (0, 1))])
    return lines


def _percent(shares: Sequence[float] | None, index: int) -> str:
    return "" if shares is None else f"{shares[index]:.1f}"


def _cells(row: dict[str, Any], stated: dict[str, Any], columns: Iterable[str]) -> list[str]:
    """Ours, with the paper's in brackets, and the speedups."""
    digits = {name: 2 if name.startswith("traffic") else 0 for name in columns}
    cells = [f"{row[name]:.{n}f} ({stated[name]:.{n}f})" for name, n in digits.items()]
    return [*cells, f"{row['speedup_vertical']:.2f}", f"{row['speedup']:.2f}"]


def _ours(f: dict[str, Any]) -> str:
    low, high = f["ours"]
    return paper.span_text(low, high, f["unit"])


def _whys(data: dict[str, Any]) -> list[tuple[str, str]]:
    return [*_row_whys(data), *((f["what"], f["why"]) for f in data["figures"] if f["why"])]


def _row_whys(data: dict[str, Any]) -> list[tuple[str, str]]:
    return [(row["label"], row["why"]) for row in data["rows"] if row["why"]]


def _limit_table(rows: Iterable[RowRuns]) -> PageTable:
    """Share of the time in regions by what limits each; the columns are what limits any."""
    labels = {r.key: r.label for r in paper.TABLE2}
    parts = {labels[row.key]: row.regions() for row in rows}
    limits = list(dict.fromkeys(x.limit for found in parts.values() for x in found))
    lines = []
    for label, found in parts.items():
        total = sum(x.seconds for x in found)
        shares = (sum(x.seconds for x in found if x.limit == limit) / total if total else 0.0 for limit in limits)
        lines.append([label, str(len(found)), *(f"{share:.0%}" if share else "" for share in shares)])
    return PageTable(("row", "regions", *limits), lines, ("regions", *limits))


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
    columns = ("app", "mode", "phase", "operators", "limited by", "bulk µs", "Kitsune µs", "speedup")
    rows = [
        [
            r["app"],
            r["mode"],
            r["phase"],
            ", ".join(r["ops"]),
            r["limit"],
            f"{r['bulk_us']:,.1f}",
            f"{r['kitsune_us']:,.1f}",
            f"{r['speedup']:.2f}",
        ]
        for r in data["regions"]
    ]
    return PageTable(columns, rows, columns[5:])
