"""Write the table of docs/kernels.md: what kernels of each family can do, and why not where they cannot.

python -m benchmarks.tables.features

Needs no GPU: kernels are planned and their sources made, not compiled.
"""

from __future__ import annotations

from benchmarks.lib.features import COLUMNS, FRAMES, MODELS, cell
from benchmarks.lib.marked import table, with_parts
from benchmarks.lib.places import DOCS

PAGE = DOCS / "kernels.md"
WORKS, REFUSED = "yes", "no"


def parts() -> dict[str, str]:
    """The table, and a line for each cell that is refused."""
    rows, reasons = [], []
    for feature in (*MODELS, *FRAMES):
        found = {column.name: cell(feature, column) for column in COLUMNS}
        rows.append([feature, *(REFUSED if why else WORKS for why in found.values())])
        reasons += [f"- {feature}, {name}: {why}." for name, why in found.items() if why]
    return {
        "features": table(["", *(c.name for c in COLUMNS)], rows, left=1 + len(COLUMNS)),
        "refusals": "\n".join(reasons),
    }


def main() -> None:
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(with_parts(text, parts(), "tables/features.py", PAGE.name), encoding="utf-8")


if __name__ == "__main__":
    main()
