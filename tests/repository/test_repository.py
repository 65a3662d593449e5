"""README's tables are the results, links lead somewhere, and packaging names what exists."""

from __future__ import annotations

import importlib
import json
import re
import sys
import tomllib

import pytest
from places import ROOT

from benchmarks.lib import cases


@pytest.fixture
def make_tables():
    for name in ("cases", "make_tables"):
        sys.modules.pop(name, None)
    return importlib.import_module("benchmarks.tables.make_tables")


@pytest.mark.smoke
def test_pages_are_in_step_with_the_results(make_tables) -> None:
    assert {part for parts in make_tables.PAGES.values() for part in parts} == set(make_tables.tables())
    for page, parts in make_tables.PAGES.items():
        text = page.read_text(encoding="utf-8")
        assert make_tables.filled(text, parts) == text, "run `make tables`"


def test_a_result_makes_a_row(make_tables, tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_tables.Case("one", "nerf", 64, "One", goal_us=9.0)
    result = {
        "rows": 64,
        "arms": {n: {"us": t} for n, t in zip(make_tables.ARMS, (40.0, 30.0, 20.0, 10.0), strict=True)},
        "speedup": 2.0,
        "error": 1e-3,
        "eager_error": 2e-3,
        "plan": {"regions": [{"chosen": {"strategy": "vertical", "predicted_us": 11.0}}]},
        "dram_bytes": {"ir": {"read": 1e6, "write": 2e6}, "tilestream": {"read": 1.5e6, "write": 2e6}},
    }
    (tmp_path / "one.json").write_text(json.dumps(result))
    monkeypatch.setattr(cases, "RESULTS", tmp_path)
    row = make_tables.times([case]).splitlines()[-1]
    cells = [cell.strip() for cell in row.strip("|").split("|")]
    want = ["One", "64", "40.0", "30.0", "20.0", "**10.0**", "2.00", "9.0", "vertical", "0.50"]
    assert cells == want
    assert "1.5 | 1.0 | 2.0 | 2.0" in make_tables.dram([case])


def test_a_missing_marker_is_an_error(make_tables) -> None:
    with pytest.raises(ValueError, match="main"):
        make_tables.filled("# no markers\n", ["main"])


def test_cases_are_models_that_exist(make_tables) -> None:
    from tilestream.apps import APPS

    assert {c.model for c in cases.CASES.values()} == set(APPS)
    assert len(cases.OTHERS) == 10


@pytest.mark.parametrize(
    "page", ["README.md", "CONTRIBUTING.md", *sorted(f"docs/{p.name}" for p in (ROOT / "docs").glob("*.md"))]
)
def test_links_lead_somewhere(page: str) -> None:
    path = ROOT / page
    for link in re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", path.read_text(encoding="utf-8")):
        if not link.startswith(("http://", "https://", "mailto:")):
            assert (path.parent / link).exists(), f"{page} links to {link}"


def test_entry_points_name_what_exists() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    points = {**project["scripts"], **project["entry-points"]["torch_dynamo_backends"]}
    for target in points.values():
        module, _, name = target.partition(":")
        assert callable(getattr(importlib.import_module(module), name))


def test_every_dependency_is_pinned_for_ci() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    pins = {
        re.split(r"[=<>]", line)[0].lower().replace("_", "-")
        for line in (ROOT / "constraints.txt").read_text().splitlines()
        if line and not line.startswith("#")
    }
    wanted = [*project["dependencies"], *(d for extra in project["optional-dependencies"].values() for d in extra)]
    assert {re.split(r"[=<>\[]", d)[0].lower() for d in wanted} <= pins


def test_package_data_is_there() -> None:
    globs = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["tilestream"]
    for glob in globs:
        assert list((ROOT / "src" / "tilestream").glob(glob)), glob


def test_no_file_is_longer_than_500_lines() -> None:
    kinds = (".py", ".cpp", ".h", ".cuh", ".j2")
    files = [p for folder in ("src", "tests") for p in (ROOT / folder).rglob("*") if p.suffix in kinds]
    assert len(files) > 100
    assert not [p.name for p in files if len(p.read_text(encoding="utf-8").splitlines()) > 500]
