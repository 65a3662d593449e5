"""What tests patch exists, and so does what GPU tests take from tilestream: where there is no GPU nothing runs them.

A module that is missing pyright reports; a name that a module or class lacks it does not, since
``reportAttributeAccessIssue`` is off for tests, and a name in a string it never sees.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from places import TESTS
from used_names import used

FILES = sorted(p for p in TESTS.rglob("*.py") if "golden" not in p.parts)


def is_gpu(path: Path) -> bool:
    return path.parent.name == "gpu"


def test_what_is_patched_or_taken_exists() -> None:
    found = {path: used(path.read_text(encoding="utf-8"), "tilestream" if is_gpu(path) else "") for path in FILES}
    missing = [f"{path.relative_to(TESTS)}, {what}" for path, names in found.items() for what in names.missing]
    assert not missing, "\n".join(missing)
    # What fixtures hand out is not looked up. Those patches fail by themselves, in tests that run everywhere.
    assert not [what for path, names in found.items() if is_gpu(path) for what in names.unknown]
    patched = sum(names.patched for names in found.values())
    assert patched > 200 and sum(len(names.unknown) for names in found.values()) < 0.1 * patched


PATCHES = {
    "monkeypatch.setattr(timing, 'nothing', 1)": "timing",
    "monkeypatch.delattr(timing, 'nothing')": "timing",
    "monkeypatch.setattr(tilestream.run.timing, 'nothing', 1)": "run.timing",
    "monkeypatch.setattr('tilestream.run.timing.nothing', 1)": "run.timing.nothing",
    "mock.patch('tilestream.run.nowhere.capture')": "nowhere.capture",
    "mock.patch.object(timing.Captured, 'nothing')": "Captured",
    "setattr(timing, 'nothing', 1)": "timing",
    "monkeypatch.setattr(Stub, 'nothing', 1)": "Stub",
    "monkeypatch.setattr(found, 'nothing', 1)": "run.timing",
    "monkeypatch.setattr(listed, 'early_launches', 1)": "run.timing",
    "timing.nothing = 1": "timing",
    "from tilestream.run.timing import nothing": "timing",
    "prepare.Kind.nothing()": "Kind",
}
"""A line each with a name that does not exist, and what lacks it."""

AROUND = """
import importlib
import tilestream.run.timing
from unittest import mock
from tilestream.run import other_ways, prepare, timing
class Stub:
    kept = 1
    def run(self): ...
def test(monkeypatch, given):
    found = importlib.import_module("tilestream.run.timing")
    for listed in (timing, other_ways):
        {line}
"""


@pytest.mark.parametrize("line", PATCHES)
def test_a_name_that_does_not_exist_is_reported(line: str) -> None:
    (what,) = used(AROUND.format(line=line), "tilestream").missing
    assert PATCHES[line] in what


@pytest.mark.parametrize(
    "line",
    [
        "monkeypatch.setattr(timing, 'capture', 1)",
        "monkeypatch.setattr(timing, 'nothing', 1, raising=False)",
        "monkeypatch.setattr('tilestream.run.timing.capture', 1)",
        "monkeypatch.setattr(Stub, 'kept', 1)",
        "monkeypatch.setattr(Stub, 'run', 1)",
        "timing = given; timing.nothing = 1",
    ],
)
def test_a_name_that_exists_is_not(line: str) -> None:
    assert not used(AROUND.format(line=line), "tilestream").missing


def test_what_is_not_known_is_counted() -> None:
    found = used(AROUND.format(line="monkeypatch.setattr(given, 'nothing', 1)"))
    assert len(found.unknown) == 1 and not found.missing and found.patched == 0
