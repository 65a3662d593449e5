"""A study: rows that were measured here, each beside what the paper or its released code says."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path

from rich.table import Table

Cell = str | int | float | bool | None


def _silent(line: str) -> None:
    """No progress is wanted."""


@dataclass(frozen=True)
class Options:
    """How studies run.

    ``quick``: smaller graphs where a study allows it. ``cora``: where Cora's links are. ``most_cycles``: what is
    expected to take more is estimated, not simulated, and its row says so.
    """

    quick: bool = False
    cora: Path | None = None
    most_cycles: float = 1e9
    progress: Callable[[str], None] = _silent


SPEEDUPS = "speedup"


@dataclass(frozen=True)
class Errors:
    """Of a column, how far ``count`` rows are off the published figures: mean and worst, as shares without sign.

    ``fits``: of rows that were told something of what they should give, or of the others.
    """

    what: str
    fits: bool
    count: int
    mean: float
    worst: float

    def __str__(self) -> str:
        which = "fitted" if self.fits else "not fitted"
        rows = f"{self.count} {'row' if self.count == 1 else 'rows'} {which}"
        return f"{self.what.removeprefix('off ')}, {rows}: {self.mean:.1%} in the mean, {self.worst:.1%} at most."


def _share(row: Mapping[str, Cell], what: str) -> float | None:
    """How far a row is off in a column, without sign; None where nothing is published, or a speedup is over itself."""
    if what == SPEEDUPS:
        ours, published = row.get("speedup"), row.get("published speedup")
        if not isinstance(ours, int | float) or not isinstance(published, int | float) or published == 1 == ours:
            return None
        return abs(ours / published - 1)
    cell = row.get(what)
    return abs(float(str(cell).split()[0])) / 100 if cell else None


@dataclass(frozen=True)
class Study:
    """Rows of one table. Every row has the same keys; ``None`` is a cell that the source does not give.

    ``source``: the figure, table or section that the row is held against. ``notes``: what explains the differences.
    """

    name: str
    title: str
    source: str
    rows: tuple[Mapping[str, Cell], ...]
    notes: tuple[str, ...] = ()
    seconds: float = field(default=0.0, compare=False)

    def errors(self) -> tuple[Errors, ...]:
        """How far the figures are off the published ones, rows that are fits apart: by each column of differences, and
        of speedups."""
        found: list[Errors] = []
        for what in (
            *(c for c in self.columns() if c == "off" or c.endswith(" off") or c.startswith("off ")),
            SPEEDUPS,
        ):
            for fits in (False, True):
                shares = [
                    s for row in self.rows if bool(row.get("fitted")) is fits and (s := _share(row, what)) is not None
                ]
                if shares:
                    found.append(Errors(what, fits, len(shares), sum(shares) / len(shares), max(shares)))
        return tuple(found)

    def json(self) -> dict[str, object]:
        return {
            "name": self.name,
            "title": self.title,
            "source": self.source,
            "rows": [dict(row) for row in self.rows],
            "notes": list(self.notes),
            "errors": [asdict(errors) for errors in self.errors()],
            "seconds": round(self.seconds, 2),
        }

    @staticmethod
    def read(path: Path) -> Study:
        """What ``json`` gave, from a file."""
        read = json.loads(path.read_text(encoding="utf-8"))
        rows, notes = tuple(read["rows"]), tuple(read["notes"])
        return Study(read["name"], read["title"], read["source"], rows, notes, read["seconds"])

    def columns(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(key for row in self.rows for key in row))

    def table(self) -> Table:
        """For a terminal."""
        made = Table(title=f"{self.title} ({self.source})", title_justify="left", box=None, pad_edge=False)
        for column in self.columns():
            numeric = any(isinstance(row.get(column), (int, float)) for row in self.rows)
            made.add_column(column, justify="right" if numeric else "left", overflow="fold")
        for row in self.rows:
            made.add_row(*(text(row.get(c)) for c in self.columns()))
        return made

    def markdown(self) -> str:
        """A section of a document."""
        columns = self.columns()
        lines = [f"## {self.title}", "", f"Beside: {self.source}.", ""]
        lines.append("| " + " | ".join(columns) + " |")
        right = {c for c in columns if any(isinstance(r.get(c), (int, float)) for r in self.rows)}
        lines.append("|" + "|".join("--:" if c in right else "---" for c in columns) + "|")
        lines += ["| " + " | ".join(text(row.get(c)) for c in columns) + " |" for row in self.rows]
        told = [*map(str, self.errors()), *self.notes]
        if told:
            lines += ["", *(f"- {note}" for note in told)]
        return "\n".join([*lines, ""])


class Timer:
    """Seconds since it was made."""

    def __init__(self) -> None:
        self.start = time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.start


def text(cell: Cell) -> str:
    """A cell as it is shown: thousands apart, three significant digits of fractions, empty where there is nothing."""
    if cell is None:
        return ""
    if isinstance(cell, bool):
        return "yes" if cell else "no"
    if isinstance(cell, int):
        return f"{cell:,}"
    if isinstance(cell, float):
        return f"{cell:,.0f}" if abs(cell) >= 1000 else f"{cell:.3g}"
    return cell


def off(measured: float, reference: float | None) -> str | None:
    """How far a measured figure is from its reference, as ``+1.2 %``; None without a reference."""
    return None if not reference else f"{100 * (measured / reference - 1):+.2f} %"


def markdown(studies: Iterable[Study]) -> str:
    return "\n".join(study.markdown() for study in studies)
