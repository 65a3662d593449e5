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
from benchmarks.run.ragged_kernels import RESULT, counted, summary

PAGE = DOCS / "simulator.md"


LAST = {
    "fresh": "fresh set, seen since",
    "validation": "validation set, shares fitted on the even kernels of both",
}


def _line(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    found = summary(rows)
    worst = max(counted(rows), key=lambda r: abs(r["predicted_us"] / r["us"] - 1))
    percents = [f"{100 * found['mean_absolute']:.0f}%", *(f"{100 * found[k]:+.0f}%" for k in ("mean", "worst"))]
    return [name, str(found["kernels"]), *percents, us(worst["us"]), us(worst["predicted_us"])]


def part() -> str:
    """Errors of the third set, or of the fresh one until it is measured, by kind of kernel and of graph, and of all."""
    found = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    by_kind = next((of for of in ("third", "fresh") if of in found), None)
    lines = []
    for of in [name for name in ("third", *LAST) if name in found]:
        rows = counted(found[of]["rows"])
        kinds: dict[str, list[dict[str, Any]]] = {}
        for told in (lambda r: r["kernel"].split()[0], lambda r: r["graph"]):
            for row in rows if of == by_kind else ():
                kinds.setdefault(told(row), []).append(row)
        lines += [_line(kind, each) for kind, each in kinds.items()] + [_line(LAST.get(of, "all, unseen"), rows)]
    heads = ["", "number", "mean absolute error", "mean error", "worst", "the worst, us", "simulated"]
    return table(heads, lines) if lines else "Not measured yet."


def filled(text: str) -> str:
    return with_parts(text, {"ragged": part()}, "tables/ragged_tables.py", PAGE.name)


def main() -> int:
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
