"""Parts of pages that scripts write, between ``<!-- NAME: made by benchmarks/SCRIPT -->`` and ``<!-- end -->``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence


def with_parts(text: str, made: Mapping[str, str], script: str, page: str) -> str:
    """``text`` of ``page`` with every part of ``script``'s as ``made`` has it.

    Raises:
        ValueError: a part's marker is not there, or twice.
    """
    for name, part in made.items():
        marked = re.compile(rf"(<!-- {name}: made by benchmarks/{script} -->\n).*?(\n<!-- end -->)", re.DOTALL)
        text, times = marked.subn(lambda m, part=part: m[1] + part + m[2], text)
        if times != 1:
            raise ValueError(f"{page} has {times} parts marked {name!r}, not one")
    return text


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    """A Markdown table, its first ``left`` columns to the left and the others to the right."""
    rule = ["---"] * left + ["---:"] * (len(headings) - left)
    return "\n".join("| " + " | ".join(line) + " |" for line in (headings, rule, *rows))


def us(value: float | None) -> str:
    """Microseconds as tables have them."""
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
