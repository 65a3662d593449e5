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


def test_the_model_of_readme_goes_through_its_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    from typer.testing import CliRunner

    from tilestream.cli.main import app

    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    (model,) = (b for b in re.findall(r"```python\n(.*?)```", readme, re.DOTALL) if b.startswith("# my.py"))
    (tmp_path / "my.py").write_text(model)
    monkeypatch.chdir(tmp_path)
    told = re.findall(r"^tilestream ((?:explain|check|simulate|trace) my\.py:make.*?) *#", readme, re.MULTILINE)
    assert len(told) == 4
    for call in told:
        words = call.split() + (["--rows", "100"] if call.startswith("check") else [])  # on the CPU, all take seconds
        done = CliRunner().invoke(app, words, catch_exceptions=False)
        assert done.exit_code == 0, done.output
    assert (tmp_path / "timeline.json").stat().st_size > 1000
