"""Where tests lie, in a folder of the room that they test, their helpers in ``tests/lib``; and where benchmarks lie."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from places import BENCHMARKS, PACKAGE, TESTS

pytestmark = pytest.mark.smoke

FILES = sorted(p for p in TESTS.rglob("*.py"))
OTHERS = {"gpu", "lib", "repository"}
"""Folders of tests that are no room of the package: the GPU's, the repository's own, helpers."""


def test_no_file_lies_loose() -> None:
    assert [p.name for p in FILES if p.parent == TESTS] == ["conftest.py"]


def test_tests_lie_in_a_folder_of_their_room() -> None:
    rooms = {p.name for p in PACKAGE.iterdir() if p.is_dir()} | OTHERS
    assert {p.parent.relative_to(TESTS).parts[0] for p in FILES if p.parent != TESTS} <= rooms
    assert not [p.name for p in FILES if p.parent.name == "lib" and p.name.startswith("test_")]


def test_no_two_files_have_one_name() -> None:
    """A module of tests is imported by its name alone, whichever folder it lies in."""
    counts = Counter(p.name for p in FILES if p.name != "conftest.py")
    assert not [name for name, count in counts.items() if count > 1]


def test_what_folders_share_lies_in_lib() -> None:
    """pytest puts a folder on the path when it comes to it: a module of tests is there for its own folder alone."""
    reads = re.compile(r"^\s*(?:from|import) (test_\w+)", re.MULTILINE)
    strays = [
        f"{path.name} imports {name}"
        for path in FILES
        for name in reads.findall(path.read_text(encoding="utf-8"))
        if not path.with_name(f"{name}.py").exists()
    ]
    assert not strays


FLOORS = ("lib", "run", "fit", "tables")
"""Folders of benchmarks from the ground up: each imports from those before it, and from itself."""


def test_benchmarks_lie_in_their_folders_and_import_downwards() -> None:
    folders = [p for p in BENCHMARKS.iterdir() if p.is_dir() and p.name not in ("results", "__pycache__")]
    assert sorted(p.name for p in folders) == sorted(FLOORS)
    assert sorted(p.name for p in BENCHMARKS.glob("*.py")) == ["__init__.py", "code_size.py"]
    upwards = [
        f"{path.parent.name}/{path.name} imports {room}"
        for path in BENCHMARKS.glob("*/*.py")
        for room in re.findall(r"^\s*from benchmarks\.(\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        if FLOORS.index(room) > FLOORS.index(path.parent.name)
    ]
    assert not upwards
