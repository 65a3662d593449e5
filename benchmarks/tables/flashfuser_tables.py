"""Write the tables of docs/flashfuser.md and docs/flashfuser-missing.md from
``benchmarks/results/flashfuser_study.json``, and those of docs/few-rows.md and docs/few-rows-results.md from what their
benchmarks measured.

tilestream reproduce flashfuser --json benchmarks/results/flashfuser_study.json
python -m benchmarks.tables.flashfuser_tables
"""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from benchmarks.lib.marked import table, with_parts
from benchmarks.lib.places import DOCS, RESULTS
from benchmarks.tables import few_rows_tables, projections_tables
from tilestream.studies.flashfuser.tables import tables

STUDY = RESULTS / "flashfuser_study.json"
PAGE = DOCS / "flashfuser.md"
MISSING = DOCS / "flashfuser-missing.md"
APART = ("missing", "inconsistent")
"""Marked parts of ``MISSING``; all others are ``PAGE``'s."""
FEW_ROWS = {
    DOCS / "few-rows.md": ("collectives",),
    DOCS / "few-rows-results.md": (
        "shapes",
        "choices",
        "exchanges",
        "clocks",
        "rows",
        "blocks",
        "layers",
        "models",
        "tuned",
        "options",
        "errors",
        "counted bytes",
    ),
}
"""Each page and the marked parts that it must have, once."""
SCRIPT = "tables/flashfuser_tables.py"


def filled(text: str, page: Path = PAGE) -> str:
    """``text`` of ``PAGE`` or ``MISSING`` with every marked part rewritten.

    Raises:
        ValueError: a marker is missing.
    """
    data = json.loads(STUDY.read_text(encoding="utf-8"))
    made = {
        shown.key: table(shown.columns, [[c.replace("|", "\\|") for c in r] for r in shown.cells])
        for shown in tables(data)
    }
    made["inconsistent"] = "\n".join(
        textwrap.fill(f"- {line}", 118, subsequent_indent="  ") for line in data["inconsistent"]
    )
    made["timed ablation"] = few_rows_tables.ablation()
    made["timed arms"] = few_rows_tables.ablation_means()
    made["fused by others"] = few_rows_tables.fused_by_others()
    parts = {name: part for name, part in made.items() if (name in APART) == (page == MISSING)}
    return with_parts(text, parts, SCRIPT, page.name)


def few_rows() -> dict[str, str]:
    """Marker to what stands under it in the pages of ``FEW_ROWS``."""
    return {**few_rows_tables.tables(), "layers": projections_tables.layers()}


def filled_few_rows(page: Path) -> str:
    """The text of a page of ``FEW_ROWS`` with its parts as the results have them now.

    Raises:
        ValueError: a marker is missing.
    """
    made = few_rows()
    return with_parts(page.read_text(encoding="utf-8"), {n: made[n] for n in FEW_ROWS[page]}, SCRIPT, page.name)


if __name__ == "__main__":
    for page in (PAGE, MISSING):
        page.write_text(filled(page.read_text(encoding="utf-8"), page), encoding="utf-8")
    for page in FEW_ROWS:
        page.write_text(filled_few_rows(page), encoding="utf-8")
