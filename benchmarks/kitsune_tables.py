"""Write the tables of docs/reproduce-kitsune.md from ``benchmarks/results/kitsune.json`` and ``kitsune_h200.json``.

tilestream reproduce kitsune --json benchmarks/results/kitsune.json
tilestream reproduce kitsune --device h200 --no-sensitivity --json benchmarks/results/kitsune_h200.json
python benchmarks/kitsune_tables.py
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from make_tables import table
from prose import wrapped

from tilestream.studies.kitsune.outcome import geomean
from tilestream.studies.kitsune.paper import INFERENCE, TRAINING, span_text

ROOT = Path(__file__).parent.parent
H200 = ROOT / "benchmarks" / "results" / "kitsune_h200.json"
RESULTS = ROOT / "benchmarks" / "results" / "kitsune.json"
PAGE = ROOT / "docs" / "reproduce-kitsune.md"

COLUMNS = (
    ("operators", "operators", 0),
    ("fused_vertical", "fused, vertical", 0),
    ("fused_kitsune", "fused, Kitsune", 0),
    ("traffic_vertical", "traffic saved, vertical (%)", 2),
    ("traffic_kitsune", "traffic saved, Kitsune (%)", 2),
)


def table2(data: dict[str, Any]) -> str:
    rows = []
    for row in data["rows"]:
        cells = [f"{row[k]:.{n}f} ({row['paper'][k]:.{n}f})" for k, _, n in COLUMNS]
        rows.append([row["label"], *cells, f"{row['speedup_vertical']:.2f}", f"{row['speedup']:.2f}"])
    return table(["row", *(h for _, h, _ in COLUMNS), "speedup, vertical", "speedup, Kitsune"], rows)


def whys(data: dict[str, Any]) -> str:
    return "\n".join(f"- **{row['label']}**: {row['why']}" for row in data["rows"] if row["why"])


def figures(data: dict[str, Any]) -> str:
    lines = ["| figure | paper | ours | why they differ |", "|---|---:|---:|---|"]
    for f in data["figures"]:
        low, high = f["ours"]
        lines.append(f"| {f['what']} | {f['paper']} | {span_text(low, high, f['unit'])} | {f['why']} |")
    return "\n".join(lines)


def executions(data: dict[str, Any]) -> str:
    """Speedup of each execution, and the share of time with SM and DRAM both low, on the base device."""
    runs = {(r["app"], r["mode"], r["execution"]): r for r in data["runs"] if r["variant"] == "base"}
    rows = []
    for row in data["rows"]:
        at = {e: r for (app, mode, e), r in runs.items() if (app, mode) == (row["app"], row["mode"])}
        bulk = at["bulk"]["time_us"]
        cells = [f"{bulk:,.0f}"]
        for execution in ("vertical", "kitsune", "kitsune, one arbiter", "mixed"):
            cells.append(f"{bulk / at[execution]['time_us']:.2f}")
        for execution in ("bulk", "kitsune"):
            cells.append(f"{at[execution]['quadrants']['both_low']:.0%}")
        rows.append([row["label"], *cells, f"{row['speedup_l2_reuse']:.2f}"])
    headings = ["row", "bulk (us)", "vertical", "Kitsune", "Kitsune, one arbiter", "mixed"]
    headings += ["both low: bulk", "both low: Kitsune", "Kitsune, L2 reuse"]
    return table(headings, rows)


def devices(*found: dict[str, Any]) -> str:
    """Speedups over bulk on each device, with the geometric mean of each mode."""
    kinds = ("speedup_vertical", "speedup_one_arbiter", "speedup", "speedup_mixed")
    rows = [
        [row["label"], *(f"{data['rows'][i][k]:.2f}" for data in found for k in kinds)]
        for i, row in enumerate(found[0]["rows"])
    ]
    for mode in (INFERENCE, TRAINING):
        of_mode = [[r for r in data["rows"] if r["mode"] == mode] for data in found]
        rows.append([f"{mode}, geomean", *(f"{geomean([r[k] for r in part]):.2f}" for part in of_mode for k in kinds)])
    names = ("vertical", "Kitsune, one arbiter", "Kitsune", "mixed")
    return table(["row", *(f"{data['device']}: {n}" for data in found for n in names)], rows)


def tables() -> dict[str, str]:
    data, h200 = (json.loads(path.read_text(encoding="utf-8")) for path in (RESULTS, H200))
    made = {"table2": table2(data), "whys": whys(data), "figures": figures(data), "executions": executions(data)}
    return {**made, "devices": devices(data, h200)}


def filled(text: str) -> str:
    """``text`` with every marked part rewritten, and its prose wrapped.

    Raises:
        ValueError: a marker is missing.
    """
    for name, made in tables().items():
        pattern = re.compile(
            rf"(<!-- {name}: made by benchmarks/kitsune_tables.py -->\n).*?(\n<!-- end -->)", re.DOTALL
        )
        text, times = pattern.subn(lambda m, made=made: m[1] + made + m[2], text)
        if times != 1:
            raise ValueError(f"{PAGE.name} has {times} parts marked {name!r}, not one")
    return wrapped(text)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
