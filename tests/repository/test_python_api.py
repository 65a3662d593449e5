"""The page of the Python interface: its code runs, its sample is what is printed, and no public name is missing."""

from __future__ import annotations

import contextlib
import importlib
import inspect
import io
import re
from dataclasses import fields
from functools import lru_cache
from typing import Any

import pytest
from places import DOCS

import tilestream
from tilestream import Options, sparse

PAGE = DOCS / "python-api.md"
TEXT = PAGE.read_text(encoding="utf-8")
sample: Any = importlib.import_module("benchmarks.tables.explain_sample")


@lru_cache
def outputs() -> list[str]:
    """What each block of the page prints, run one after another."""
    scope: dict[str, object] = {}
    made = []
    for number, block in enumerate(sample.blocks(TEXT)):
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(compile(block, f"docs/python-api.md, block {number}", "exec"), scope)
        made.append(out.getvalue())
    return made


def test_the_code_of_the_page_runs() -> None:
    assert len(outputs()) >= 8 and any("fastest" in text for text in outputs())


def test_the_sample_is_what_explain_prints() -> None:
    """Word by word; predictions may move by a fifth before ``benchmarks/tables/explain_sample.py`` has to run again."""
    found = sample.SAMPLE.search(TEXT)
    assert found is not None
    number = re.compile(r"\d[\d,.]*\d|\d")
    shown, printed = found[2], outputs()[1]
    words = [number.sub("#", re.sub(r"[ ─]+", " ", text)).split() for text in (shown, printed)]
    assert words[0] == words[1], "run python -m benchmarks.tables.explain_sample"
    for mine, now in zip(number.findall(shown), number.findall(printed), strict=True):
        a, b = (float(text.replace(",", "").rstrip(".")) for text in (mine, now))
        assert a == pytest.approx(b, rel=0.2), "run python -m benchmarks.tables.explain_sample"


def test_every_public_name_is_on_the_page() -> None:
    words = set(re.findall(r"`(\w+)", TEXT)) | set(re.findall(r"\btilestream\.(\w+)", TEXT))
    assert set(tilestream.__all__) <= words, set(tilestream.__all__) - words
    assert set(sparse.__all__) <= words, set(sparse.__all__) - words
    assert {f.name for f in fields(Options)} <= words
    assert set(tilestream._PARTS) <= words


@pytest.mark.parametrize("shown", re.findall(r"^### `(\w+\(.*\))`$|[|,] `(\w+\(.*?\))`", TEXT, re.MULTILINE))
def test_signatures_are_those_of_the_code(shown: tuple[str, str]) -> None:
    said = shown[0] or shown[1]
    name = said.split("(")[0]
    found = getattr(tilestream, name, None) if name in tilestream.__all__ else getattr(sparse, name, None)
    if found is None:  # a method, in a table of what an object has
        return
    bare = inspect.signature(found)
    bare = bare.replace(
        parameters=[p.replace(annotation=p.empty) for p in bare.parameters.values()], return_annotation=bare.empty
    )
    assert said == f"{name}{bare}".replace("<factory>", "{}")
