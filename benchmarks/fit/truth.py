"""Predicted against measured: the simulator's times for the kernels that ``silicon.py`` timed on an H200.

    python -m benchmarks.fit.truth          print the tables; write results/truth.json, docs/truth.png and both pages
    python -m benchmarks.fit.truth --check  exit code 1 if docs/truth.md or truth-kernels.md is not what they say

PyTorch's kernels are predicted by ``tilestream.simulator.library``, pipelines as ``tilestream.simulate`` does, from the
IR that ran. The validation set is every second kernel of most files, and all of ``silicon_validation.json``: constants
were fitted (``fit_simulator.py``) on the others. Whole models are ``whole_truth.py``'s.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata

from benchmarks.fit.predicted import Predicted
from benchmarks.fit.predicted_kernels import SKIPPED, predict_us
from benchmarks.lib.marked import table
from benchmarks.lib.places import DOCS, RESULTS
from tilestream import devices
from tilestream.devices import Device

DOC = DOCS / "truth.md"
KERNELS = DOCS / "truth-kernels.md"
FRESH = DOCS / "truth-fresh.md"
PICTURE = DOC.with_suffix(".png")
BEGIN, END = "<!-- truth: begin -->", "<!-- truth: end -->"
GROUPS = {
    "linear": "GEMM",
    "matmul": "GEMM",
    "bmm": "GEMM",
    "elementwise": "elementwise",
    "pipeline": "pipelines of ours",
}
WIDTHS = "GEMM, odd widths and neighbours"
OTHERS = "reductions, lookups, scatters, concatenations, copies"


@dataclass(frozen=True)
class Point(Predicted):
    """One kernel in one state; microseconds."""

    name: str
    group: str
    state: str
    validation: bool
    measured_us: float
    predicted_us: float


@dataclass(frozen=True)
class Score:
    """Of a set of points: mean absolute error and mean error, in percent, and Spearman's rank correlation."""

    group: str
    count: int
    mape: float
    bias: float
    rank: float

    @classmethod
    def of(cls, group: str, points: Sequence[Point]) -> Score:
        errors = np.array([p.error for p in points])
        ranks = rankdata([[p.measured_us for p in points], [p.predicted_us for p in points]], axis=1)
        rank = np.corrcoef(ranks)[0, 1]
        return cls(group, len(points), 100 * float(np.abs(errors).mean()), 100 * float(errors.mean()), float(rank))


def split(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to fit on and rows to validate by: of each kind every second kernel, in both its states."""
    parts: tuple[list[dict[str, Any]], list[dict[str, Any]]] = [], []
    seen: dict[str, list[str]] = {}
    for row in rows:
        names = seen.setdefault(row["kind"], [])
        if row["name"] not in names:
            names.append(row["name"])
        parts[names.index(row["name"]) % 2].append(row)
    return parts


def split_widths(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Odd widths to fit on, and those to validate by: all with 10,240 rows."""
    kept = [r for r in rows if 10_240 in (r["shape"]["m"], r["shape"]["k"])]
    return [r for r in rows if r not in kept], kept


def group_of(row: dict[str, Any]) -> str:
    return WIDTHS if row.get("set") == "silicon_widths.json" else GROUPS.get(row["kind"], OTHERS)


def points(
    rows: Sequence[dict[str, Any]], validation: bool, device: Device, group: Callable[[dict[str, Any]], str] = group_of
) -> list[Point]:
    return [
        Point(row["name"], group(row), row["state"], validation, row["us"], predict_us(row, device))
        for row in rows
        if row["kind"] not in SKIPPED
    ]


def measured(name: str) -> list[dict[str, Any]]:
    """Rows of a result file, each with the file's name; none if it is not there."""
    path = RESULTS / name
    return [row | {"set": name} for row in json.loads(path.read_text())["rows"]] if path.exists() else []


def halves() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """All rows that constants were fitted on, and all of the validation set."""
    others = [*measured("silicon_others.json"), *measured("silicon_backward.json")]
    indexed = split(measured("silicon_indexed.json"))
    parts = (_first(), split_widths(measured("silicon_widths.json")), split(others), indexed)
    fitted = [row for part, _ in parts for row in part]
    kept, *more = (part for _, part in parts)
    return fitted, [*kept, *measured("silicon_validation.json"), *(row for part in more for row in part)]


def _first() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Those of ``silicon.json``: the cost model was fitted on all of its pipelines."""
    fitted, kept = split(measured("silicon.json"))
    ours = [row for row in kept if row["kind"] == "pipeline"]
    return [*fitted, *ours], [row for row in kept if row["kind"] != "pipeline"]


def scores(found: Iterable[Point]) -> list[Score]:
    """Of all claimed kernels, of each group, of the others."""
    found = list(found)
    made = [Score.of("all of these", found)] if found else []
    for group in dict.fromkeys((*GROUPS.values(), WIDTHS, OTHERS, *(p.group for p in found))):
        members = [p for p in found if p.group == group]
        if len(members) > 2:
            made.append(Score.of(group, members))
    return made


def score_table(made: Sequence[Score]) -> str:
    rows = [(s.group, str(s.count), f"{s.mape:.1f} %", f"{s.bias:+.1f} %", f"{s.rank:.3f}") for s in made]
    return table(("", "kernels", "mean absolute error", "mean error", "rank correlation"), rows)


def point_table(found: Sequence[Point]) -> str:
    rows = [(p.name, p.state, f"{p.measured_us:.1f}", f"{p.predicted_us:.1f}", f"{p.error:+.0%}") for p in found]
    return table(("kernel", "L2", "measured us", "predicted us", "error"), rows, left=2)


def document(fitted: Sequence[Point], validation: Sequence[Point]) -> str:
    """What stands between the markers of docs/truth.md."""
    parts = [fresh_tables(), "", "### Validation set", "", score_table(scores(validation))]
    parts += ["", "### Fitted on", "", score_table(scores(fitted))]
    parts += ["", "### Whole models of the validation set", "", whole_tables()]
    return "\n".join(parts)


def kernels(fitted: Sequence[Point], validation: Sequence[Point]) -> str:
    """What stands between the markers of docs/truth-kernels.md."""
    worst = sorted(fitted, key=lambda p: -abs(p.error))[:12]
    parts = ["## Every kernel of the validation set", "", point_table(validation)]
    return "\n".join([*parts, "", "## The twelve worst of the fitted ones", "", point_table(worst)])


def filled(page: Path, made: str) -> str:
    """The page with ``made`` between its markers."""
    before, rest = page.read_text().split(BEGIN)
    return f"{before}{BEGIN}\n\n{made}\n\n{END}{rest.split(END)[1]}"


def fresh_set() -> dict[str, Any]:
    """What ``fresh_truth.py`` found; empty where it was not run."""
    path = RESULTS / "fresh_truth.json"
    return json.loads(path.read_text()) if path.exists() else {}


def fresh_kernels() -> str:
    """What stands between the markers of docs/truth-fresh.md."""
    return point_table([Point(**p) for p in fresh_set().get("points", ())])


def fresh_tables() -> str:
    """Of kernels and of whole models."""
    fresh = fresh_set()
    if not fresh:
        return "### Fresh set\n\nRun `python -m benchmarks.fit.fresh_truth`."
    made = score_table([Score(**s) for s in fresh["scores"]])
    return "\n\n".join(("### Fresh set: kernels", made, "### Fresh set: whole models", fresh["tables"]))


def whole_tables() -> str:
    """What ``whole_truth.py`` found, where it has been run."""
    path = RESULTS / "whole_truth.json"
    return json.loads(path.read_text())["tables"] if path.exists() else "Run `python -m benchmarks.fit.whole_truth`."


def draw(found: Sequence[Point], path: Path) -> None:
    """Scatter plot, both axes logarithmic; the validation set filled, fitted ones pale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 6.0))
    for index, group in enumerate(dict.fromkeys((*GROUPS.values(), WIDTHS, OTHERS))):
        for validation in (False, True):
            part = [p for p in found if p.group == group and p.validation == validation]
            axes.scatter(
                [p.measured_us for p in part],
                [p.predicted_us for p in part],
                s=22,
                color=f"C{index}",
                alpha=0.9 if validation else 0.25,
                linewidths=0,
                label=f"{group}, {'validation' if validation else 'fitted'}",
            )
    low = min(min(p.measured_us, p.predicted_us) for p in found) / 1.3
    high = max(max(p.measured_us, p.predicted_us) for p in found) * 1.3
    axes.plot([low, high], [low, high], color="0.3", linewidth=1)
    for factor in (0.85, 1.15):
        axes.plot([low, high], [low * factor, high * factor], color="0.6", linewidth=0.7, linestyle="--")
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set(xlabel="measured on an H200, us", ylabel="simulated, us")
    axes.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    device = devices.get("h200")
    to_fit, kept = halves()
    fitted, validation = points(to_fit, False, device), points(kept, True, device)
    texts = {DOC: document(fitted, validation), KERNELS: kernels(fitted, validation), FRESH: fresh_kernels()}
    made = {page: filled(page, text) for page, text in texts.items()}
    if given.check:
        stale = [page.name for page, text in made.items() if text != page.read_text()]
        if stale:
            print(f"{', '.join(stale)}: not what the measurements say: run benchmarks/fit/truth.py", file=sys.stderr)
        return int(bool(stale))
    for title, part in (("validation", validation), ("fitted", fitted)):
        print(f"{title}\n{score_table(scores(part))}\n")
    for page, text in made.items():
        page.write_text(text)
    draw([*fitted, *validation], PICTURE)
    result = {
        "device": device.name,
        "scores": {
            "validation": [asdict(s) for s in scores(validation)],
            "fitted": [asdict(s) for s in scores(fitted)],
        },
        "points": [asdict(p) for p in (*validation, *fitted)],
    }
    (RESULTS / "truth.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
