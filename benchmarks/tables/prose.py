"""Wrap the prose of Markdown pages at 120 columns: tables, code and headings stay as they are.

python -m benchmarks.tables.prose docs/ir.md README.md
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

WIDTH = 120
MARKER = re.compile(r"\s*(?:[-*+]|\d+\.)\s+")
WORD = re.compile(r"(?:`[^`]+`|[^\s`]|`)+")  # what stands in backticks is not torn apart
LIST_LIKE = re.compile(r"(?:[-*+#>|]|\d+\.)$")  # at the start of a line it would mean something else


def wrapped(text: str) -> str:
    """``text`` with every paragraph and list item wrapped anew that has a line above ``WIDTH``."""
    made: list[str] = []
    block: list[str] = []

    def end() -> None:
        made.extend(_filled(block) if any(len(line) > WIDTH for line in block) else block)
        block.clear()

    in_code = False
    for line in text.split("\n"):
        fence = line.lstrip().startswith("```")
        in_code ^= fence
        indented = line.startswith("    ") and not block
        if fence or in_code or indented or not line.strip() or line.lstrip().startswith(("|", "#", "<", ">")):
            end()
            made.append(line)
            continue
        if MARKER.match(line):
            end()
        block.append(line)
    end()
    return "\n".join(made)


def _filled(block: list[str]) -> list[str]:
    marker = MARKER.match(block[0])
    first = marker[0] if marker else re.match(r"\s*", block[0])[0]  # pyright: ignore[reportOptionalSubscript]
    indent = " " * len(first)
    words = WORD.findall(" ".join([block[0][len(first) :], *(line.strip() for line in block[1:])]))
    lines, now = [], first + words[0]
    for word in words[1:]:
        if len(now) + 1 + len(word) > WIDTH and not LIST_LIKE.match(word):
            lines.append(now)
            now = indent + word
        else:
            now += " " + word
    return [*lines, now]


def main() -> None:
    for name in sys.argv[1:]:
        path = Path(name)
        path.write_text(wrapped(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main()
