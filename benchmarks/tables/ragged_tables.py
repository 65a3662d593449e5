"""Write docs/simulator.md's table of ragged kernels from ``benchmarks/results/ragged_kernels.json``.

python -m benchmarks.run.ragged_kernels
python -m benchmarks.tables.ragged_tables          rewrite the page
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Any

from benchmarks.lib.marked import table, us, with_parts
from benchmarks.lib.places import DOCS, RESULTS
from benchmarks.run.ragged_kernels import summary

PAGE = DOCS / "simulator.md"
RESULT = RESULTS / "ragged_kernels.json"


def _line(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    found = summary(rows)
    worst = max((r for r in rows if "us" in r), key=lambda r: abs(r["predicted_us"] / r["us"] - 1))
    percents = [f"{100 * found['mean_absolute']:.0f}%", *(f"{100 * found[k]:+.0f}%" for k in ("mean", "worst"))]
    return [name, str(found["kernels"]), *percents, us(worst["us"]), us(worst["predicted_us"])]


def part() -> str:
    """Errors by kind of kernel and by kind of graph, and of all."""
    if not RESULT.exists():
        return "Not measured yet."
    rows = json.loads(RESULT.read_text(encoding="utf-8"))["rows"]
    kinds = {r["kernel"].split()[0]: [] for r in rows} | {r["graph"]: [] for r in rows}
    for row in rows:
        kinds[row["kernel"].split()[0]].append(row)
        kinds[row["graph"]].append(row)
    heads = ["", "number", "mean absolute error", "mean error", "worst", "the worst, us", "simulated"]
    return table(heads, [*(_line(name, of) for name, of in kinds.items()), _line("all", rows)])


def filled(text: str) -> str:
    return with_parts(text, {"ragged": part()}, "tables/ragged_tables.py", PAGE.name)


def main() -> int:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
