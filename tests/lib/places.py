"""Where things lie in the repository."""

from __future__ import annotations

import os
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCES = ROOT / "src"
PACKAGE = SOURCES / "tilestream"
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
BENCHMARKS = ROOT / "benchmarks"
TESTS = ROOT / "tests"
GOLDEN = TESTS / "golden"
HELPERS = TESTS / "lib"


def pythonpath(*folders: Path) -> str:
    """``PYTHONPATH`` of a process that a test starts: some folders, the tests' helpers and the package."""
    return os.pathsep.join([*map(str, (*folders, HELPERS, SOURCES)), os.environ.get("PYTHONPATH", "")])
