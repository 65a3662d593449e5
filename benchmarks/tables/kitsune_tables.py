"""Write the tables of docs/reproduce-kitsune.md and docs/kitsune.md from ``benchmarks/results/kitsune*.json``.

python -m benchmarks.run.kitsune            make the results
python -m benchmarks.tables.kitsune_tables     write the pages
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from benchmarks.lib.marked import table, with_parts
from benchmarks.lib.places import DOCS, RESULTS
from benchmarks.tables.prose import wrapped
from tilestream.studies.kitsune import report
from tilestream.studies.kitsune.outcome import geomean
from tilestream.studies.kitsune.paper import INFERENCE, TRAINING, span_text

PAGES = {
    DOCS / "reproduce-kitsune.md": (
        *("table2", "choices", "whys", "counts", "figures", "low", "executions", "devices"),
    ),
    DOCS / "kitsune.md": ("planner", "widths", "reuse", "beyond", "h200"),
}
"""Each page and the marked parts that it must have, once."""

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


def choices(data: dict[str, Any]) -> str:
    """Rows of Table 2 by other choices than ours."""
    headings = ["row", "by another choice", *(h for _, h, _ in COLUMNS[1:]), "speedup, vertical", "speedup, Kitsune"]
    return table(headings, report.other_rows(data))


def low(data: dict[str, Any]) -> str:
    """Percent of the time with SM and DRAM both low, by what may move it."""
    return table(["SM and DRAM both low (%)", *report.LOW_HEADINGS[1:]], report.low_rows(data))


def executions(data: dict[str, Any]) -> str:
    """Speedup of each execution, and the share of time with SM and DRAM both low, on the base device."""
    runs = {(r["app"], r["mode"], r["execution"]): r for r in data["runs"] if r["variant"] == "base"}
    rows = []
    for row in data["rows"]:
        at = {e: r for (app, mode, e), r in runs.items() if (app, mode) == (row["app"], row["mode"])}
        bulk = at["bulk"]["time_us"]
        cells = [f"{bulk:,.0f}"]
        for execution in ("vertical", "kitsune", "kitsune, one arbiter", "whole", "mixed"):
            cells.append(f"{bulk / at[execution]['time_us']:.2f}")
        for execution in ("bulk", "kitsune"):
            cells.append(f"{at[execution]['quadrants']['both_low']:.0%}")
        rows.append([row["label"], *cells, f"{row['speedup_l2_reuse']:.2f}", f"{row['speedup_40gb']:.2f}"])
    headings = ["row", "bulk (us)", "vertical", "Kitsune", "Kitsune, one arbiter", "whole MLPs", "mixed"]
    headings += ["both low: bulk", "both low: Kitsune", "Kitsune, L2 reuse", "Kitsune, A100 of 40 GB"]
    return table(headings, rows)


def devices(*found: dict[str, Any]) -> str:
    """Speedups over bulk on each device, with the geometric mean of each mode."""
    kinds = ("speedup_vertical", "speedup_one_arbiter", "speedup", "speedup_whole", "speedup_mixed")
    rows = [
        [row["label"], *(f"{data['rows'][i][k]:.2f}" for data in found for k in kinds)]
        for i, row in enumerate(found[0]["rows"])
    ]
    for mode in (INFERENCE, TRAINING):
        of_mode = [[r for r in data["rows"] if r["mode"] == mode] for data in found]
        rows.append([f"{mode}, geomean", *(f"{geomean([r[k] for r in part]):.2f}" for part in of_mode for k in kinds)])
    names = ("vertical", "Kitsune, one arbiter", "Kitsune", "whole MLPs", "mixed")
    return table(["row", *(f"{data['device']}: {n}" for data in found for n in names)], rows)


def counts(data: dict[str, Any]) -> str:
    """Traffic saved in the rows of training, counted otherwise."""
    rows = [row for row in data["rows"] if row["mode"] == TRAINING]
    lines = []
    for kind, column in (("vertical", "traffic_vertical"), ("Kitsune", "traffic_kitsune")):
        lines.append([f"{kind}: paper", *(f"{row['paper'][column]:.2f}" for row in rows)])
        lines.append([f"{kind}: ours, as in Table 2", *(f"{row[column]:.2f}" for row in rows)])
        others = [name for name in rows[0]["other_counts"] if name.startswith(kind)]
        lines += [[name, *(f"{row['other_counts'][name]:.2f}" for row in rows)] for name in others]
    return table(["traffic saved (%)", *(row["label"] for row in rows)], lines)


def by_mode(data: dict[str, Any], speedups: dict[str, float], mode: str) -> str:
    """The geometric mean over rows of one mode, ``speedups`` being by label."""
    return f"{geomean([speedups[row['label']] for row in data['rows'] if row['mode'] == mode]):.2f}"


def widths(data: dict[str, Any], odd: dict[str, Any]) -> str:
    shown = ("NERF inf", "NERF tr", "DLRM inf", "DLRM tr")
    rows = [
        [name, *(f"{found[label]:.2f}" for label in shown), *(by_mode(data, found, m) for m in (INFERENCE, TRAINING))]
        for name, found in odd["widths"].items()
    ]
    return table(["elements that an SM copies in a cycle", *shown, "geomean, inference", "geomean, training"], rows)


def planner(data: dict[str, Any], odd: dict[str, Any]) -> str:
    """NeRF on an H200 in microseconds: as designed here, and as the planner has it."""
    of_nerf = [r for r in data["runs"] if (r["app"], r["mode"], r["variant"]) == ("nerf", INFERENCE, "base")]
    times = {r["execution"]: r["time_us"] for r in of_nerf}
    rows = [
        ["whole MLP", times["whole"], odd["planner"]["vertical"]],
        ["spatial pipelines", times["kitsune"], odd["planner"]["spatial"]],
        ["library kernels", times["bulk"], odd["planner"]["bulk"]],
    ]
    headings = ["NeRF, 10,240 points, `h200`", "here (us)", "by `explain` (us)"]
    return table(headings, [[name, *(f"{time:.0f}" for time in pair)] for name, *pair in rows])


def reuse(data: dict[str, Any]) -> str:
    times = {(r["app"], r["mode"], r["execution"], r["variant"]): r["time_us"] for r in data["runs"]}
    rows = []
    for mode in (INFERENCE, TRAINING):
        for variant, name in (("base", "nothing kept"), ("L2 reuse", "L2 reuse")):
            cells = []
            for execution in ("vertical", "kitsune"):
                of_mode = [r["app"] for r in data["rows"] if r["mode"] == mode]
                found = [times[a, mode, "bulk", variant] / times[a, mode, execution, variant] for a in of_mode]
                cells.append(f"{geomean(found):.2f}")
            rows.append([f"{mode}, {name}", *cells])
    return table(["geometric mean over bulk", "vertical", "kitsune"], rows)


BEYOND = {"kitsune": "speedup", "deep": "", "whole": "speedup_whole", "mixed": "speedup_mixed"}


def beyond(data: dict[str, Any], odd: dict[str, Any]) -> str:
    found = {
        name: {row["label"]: row[key] for row in data["rows"]} if key else odd["deep"] for name, key in BEYOND.items()
    }
    rows = [
        [row["label"], *(f"{of[row['label']]:.2f}" for of in found.values())]
        for row in data["rows"]
        if row["mode"] == TRAINING
    ]
    for mode in (TRAINING, INFERENCE):
        rows.append([f"geometric mean, {mode}", *(by_mode(data, of, mode) for of in found.values())])
    return table(["over bulk, A100 with two arbiters", *(f"`{name}`" for name in found)], rows)


def h200(data: dict[str, Any]) -> str:
    kinds = {"vertical": "speedup_vertical", "kitsune": "speedup", "whole": "speedup_whole", "mixed": "speedup_mixed"}
    rows = [[row["label"], *(f"{row[key]:.2f}" for key in kinds.values())] for row in data["rows"]]
    for mode in (INFERENCE, TRAINING):
        of = [{row["label"]: row[key] for row in data["rows"]} for key in kinds.values()]
        rows.append([f"geometric mean, {mode}", *(by_mode(data, found, mode) for found in of)])
    return table(["over bulk", *(f"`{name}`" for name in kinds)], rows)


def tables() -> dict[str, str]:
    names = ("kitsune", "kitsune_h200", "kitsune_widths")
    data, on_h200, odd = (json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8")) for name in names)
    return {
        "table2": table2(data),
        "choices": choices(data),
        "low": low(data),
        "whys": whys(data),
        "counts": counts(data),
        "figures": figures(data),
        "executions": executions(data),
        "devices": devices(data, on_h200),
        "planner": planner(on_h200, odd),
        "widths": widths(data, odd),
        "reuse": reuse(data),
        "beyond": beyond(data, odd),
        "h200": h200(on_h200),
    }


def filled(page: Path) -> str:
    """The page with every marked part rewritten, and its prose wrapped.

    Raises:
        ValueError: a marker is missing.
    """
    made = tables()
    parts = {name: made[name] for name in PAGES[page]}
    return wrapped(with_parts(page.read_text(encoding="utf-8"), parts, "tables/kitsune_tables.py", page.name))


if __name__ == "__main__":
    for page in PAGES:
        page.write_text(filled(page), encoding="utf-8")
