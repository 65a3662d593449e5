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
from benchmarks.lib.places import DOCS
from benchmarks.run.ragged_kernels import RESULT, summary

PAGE = DOCS / "simulator.md"


def _line(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    found = summary(rows)
    worst = max((r for r in rows if "us" in r), key=lambda r: abs(r["predicted_us"] / r["us"] - 1))
    percents = [f"{100 * found['mean_absolute']:.0f}%", *(f"{100 * found[k]:+.0f}%" for k in ("mean", "worst"))]
    return [name, str(found["kernels"]), *percents, us(worst["us"]), us(worst["predicted_us"])]


def part() -> str:
    """Errors of the fresh set by kind of kernel and by kind of graph, of all of it, and of the validation set."""
    found = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    lines = []
    for name, of in (("fresh", "all"), ("validation", "validation set, two constants fitted on it")):
        rows = found.get(name, {"rows": []})["rows"]
        kinds: dict[str, list[dict[str, Any]]] = {}
        for row in rows if name == "fresh" else ():
            kinds.setdefault(row["kernel"].split()[0], []).append(row)
        for row in rows if name == "fresh" else ():
            kinds.setdefault(row["graph"], []).append(row)
        lines += [_line(kind, each) for kind, each in kinds.items()] + ([_line(of, rows)] if rows else [])
    heads = ["", "number", "mean absolute error", "mean error", "worst", "the worst, us", "simulated"]
    return table(heads, lines) if lines else "Not measured yet."


def filled(text: str) -> str:
    return with_parts(text, {"ragged": part()}, "tables/ragged_tables.py", PAGE.name)


def main() -> int:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
