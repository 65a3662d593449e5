"""The code in the documentation runs."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parent.parent / "docs"


@pytest.mark.smoke
def test_prose_is_wrapped():
    prose = importlib.import_module("prose")
    pages = [*DOCS.glob("*.md"), *(DOCS.parent / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING"))]
    long = [page.name for page in pages if prose.wrapped(text := page.read_text(encoding="utf-8")) != text]
    assert not long, f"run python benchmarks/prose.py on {', '.join(long)}"


@pytest.mark.smoke
def test_the_worked_example_of_the_ir_page():
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "ir.md").read_text(), re.DOTALL)
    assert len(blocks) == 3
    scope: dict[str, object] = {}
    exec(compile("\n".join(blocks), "docs/ir.md", "exec"), scope)
    assert not (scope["one"] == scope["two"]).all()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.smoke
def test_the_ir_page_names_every_tile_op():
    from tilestream.ir.tileops import OPS

    table = (DOCS / "ir.md").read_text().split("## Tile ops")[1]
    assert set(OPS) <= set(re.findall(r"[a-z_0-9]+", table))


@pytest.mark.smoke
def test_the_examples_of_the_training_page():
    scope: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / "training.md").read_text(), re.DOTALL):
        exec(compile(block, "docs/training.md", "exec"), scope)
    assert "consume_sum" in str(scope["kernel"])
