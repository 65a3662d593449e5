"""The code in the documentation runs."""

from __future__ import annotations

import importlib
import re
import tomllib
from pathlib import Path

import pytest
from places import DOCS


@pytest.mark.smoke
def test_prose_is_wrapped():
    prose = importlib.import_module("benchmarks.tables.prose")
    pages = [*DOCS.glob("*.md"), *(DOCS.parent / f"{name}.md" for name in ("README", "CHANGELOG", "CONTRIBUTING"))]
    long = [page.name for page in pages if prose.wrapped(text := page.read_text(encoding="utf-8")) != text]
    assert not long, f"run python -m benchmarks.tables.prose on {', '.join(long)}"


@pytest.mark.smoke
def test_the_worked_example_of_the_ir_page():
    blocks = re.findall(r"```python\n(.*?)```", (DOCS / "ir.md").read_text(), re.DOTALL)
    assert len(blocks) == 4
    scope: dict[str, object] = {}
    exec(compile("\n".join(blocks), "docs/ir.md", "exec"), scope)
    assert not (scope["one"] == scope["two"]).all()  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.smoke
def test_the_ir_page_names_every_tile_op():
    from tilestream.ir.tileops import OPS

    table = (DOCS / "ir.md").read_text().split("## Tile ops")[1]
    assert set(OPS) <= set(re.findall(r"[a-z_0-9]+", table))


@pytest.mark.smoke
def test_the_examples_of_the_training_pages():
    scope: dict[str, object] = {}
    for page in ("training.md", "training-design.md"):
        for block in re.findall(r"```python\n(.*?)```", (DOCS / page).read_text(), re.DOTALL):
            exec(compile(block, f"docs/{page}", "exec"), scope)
    assert "add_partials" in str(scope["kernel"])


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


def test_the_quick_start_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Its first program, on a CPU and with fewer rows; its second is README's model, in eval mode."""
    program, file = re.findall(r"```python\n(.*?)```", (DOCS / "quick-start.md").read_text(encoding="utf-8"), re.DOTALL)
    scope: dict[str, object] = {}
    exec(compile(program.replace("cuda", "cpu").replace("65536", "64"), "docs/quick-start.md", "exec"), scope)
    assert scope["y"].shape == (64, 3)  # pyright: ignore[reportAttributeAccessIssue]
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    assert file.replace(".eval()", "") in readme


def test_readme_is_short_and_says_more_than_results() -> None:
    lines = (DOCS.parent / "README.md").read_text(encoding="utf-8").splitlines()
    assert len(lines) <= 150
    made = [i for i, line in enumerate(lines) if line.startswith("<!-- ")]
    tables = sum(end - begin - 1 for begin, end in zip(made[::2], made[1::2], strict=True))
    assert tables <= 0.2 * len(lines)


def test_versions_of_readme_are_those_of_the_package() -> None:
    project = tomllib.loads((DOCS.parent / "pyproject.toml").read_text())["project"]
    readme = (DOCS.parent / "README.md").read_text(encoding="utf-8")
    python, torch = project["requires-python"].lstrip(">="), re.search(r"torch>=([\d.]+)", str(project["dependencies"]))
    installed = re.search(r"torch==(\d+\.\d+)", (DOCS.parent / "Makefile").read_text())
    assert torch and installed
    assert f"Python {python} or later" in readme
    assert f"torch {torch[1]} to {installed[1]}" in readme
