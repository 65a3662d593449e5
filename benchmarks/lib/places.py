"""Where benchmarks keep their results, and how one of them is started as a process of its own."""

from __future__ import annotations

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
RESULTS = ROOT / "benchmarks" / "results"


def module_command(module: str) -> list[str]:
    """The words that run a module of ``benchmarks`` (``run.few_rows``) from the root of the repository."""
    return [sys.executable, "-m", f"benchmarks.{module}"]
