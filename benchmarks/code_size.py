"""Lines of code, folder by folder, held against the ceilings of ``code_budget.toml``.

python benchmarks/code_size.py            print the table
python benchmarks/code_size.py --check    exit code 1 if a ceiling is passed

Python counts lines that hold code: no blank lines, comments or docstrings. CUDA and C++ count every line. A release may
lower a ceiling; raising one needs a reason in the change that does it.
"""

from __future__ import annotations

import argparse
import io
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "tilestream"
BUDGET = Path(__file__).parent / "code_budget.toml"
C_KINDS = (".cuh", ".h", ".cpp", ".cu", ".j2")
NO_CODE = {
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


@dataclass(frozen=True)
class Group:
    """What one ceiling counts: folders of the package, and which language."""

    name: str
    folders: tuple[str, ...]
    language: str
    ceiling: int

    @property
    def lines(self) -> int:
        texts = [path.read_text(encoding="utf-8") for path in self._files()]
        return sum(python_lines(text) if self.language == "python" else len(text.splitlines()) for text in texts)

    def _files(self) -> Iterator[Path]:
        kinds = (".py",) if self.language == "python" else C_KINDS
        for folder in self.folders:
            yield from (p for p in sorted((PACKAGE / folder).rglob("*")) if p.suffix in kinds)


def python_lines(text: str) -> int:
    """Lines that hold code: a string that is a statement of its own is documentation."""
    lines: set[int] = set()
    begins = True  # of a statement
    tokens = [t for t in tokenize.generate_tokens(io.StringIO(text).readline) if t.type != tokenize.COMMENT]
    for token, after in zip(tokens, [*tokens[1:], tokens[-1]], strict=True):
        is_text = token.type == tokenize.STRING and begins and after.type in (tokenize.NEWLINE, tokenize.ENDMARKER)
        if token.type not in NO_CODE and not is_text:
            lines.update(range(token.start[0], token.end[0] + 1))
        if token.type != tokenize.NL:
            begins = token.type in (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    return len(lines)


def budget() -> list[Group]:
    """The groups of ``code_budget.toml``."""
    groups = tomllib.loads(BUDGET.read_text(encoding="utf-8"))["group"]
    return [Group(g["name"], tuple(g["folders"]), g["language"], g["ceiling"]) for g in groups]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="exit code 1 if a ceiling is passed")
    check = parser.parse_args().check
    over = False
    for group in budget():
        lines = group.lines
        over |= lines > group.ceiling
        print(f"{group.name:28} {lines:7,} of {group.ceiling:7,}  {', '.join(group.folders)}")
    return int(check and over)


if __name__ == "__main__":
    sys.exit(main())
