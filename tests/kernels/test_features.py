"""Every cell of docs/kernels.md's table: what kernels can do as the page says, and a reason where they cannot."""

from __future__ import annotations

import re

import pytest

from benchmarks.lib.features import COLUMNS, Column, cell, cells
from benchmarks.tables.features import PAGE, REFUSED, WORKS


def told() -> dict[tuple[str, str], str]:
    """What the page says of each cell."""
    text = PAGE.read_text(encoding="utf-8")
    (part,) = re.findall(r"<!-- features: .*? -->\n(.*?)\n<!-- end -->", text, re.DOTALL)
    lines = [[word.strip() for word in line.strip("|").split("|")] for line in part.splitlines()]
    names = lines[0][1:]
    return {(line[0], name): word for line in lines[2:] for name, word in zip(names, line[1:], strict=True)}


TOLD = told()


def test_the_page_has_every_cell():
    assert TOLD.keys() == {(feature, column.name) for feature, column in cells()}
    assert set(TOLD.values()) == {WORKS, REFUSED}


@pytest.mark.parametrize(("feature", "column"), [pytest.param(f, c, id=f"{f}, {c.name}") for f, c in cells()])
@pytest.mark.every(6)
def test_a_cell_is_as_the_page_says(feature: str, column: Column):
    why = cell(feature, column)
    assert (REFUSED if why else WORKS) == TOLD[feature, column.name], why
    if why:
        assert f"- {feature}, {column.name}: " in PAGE.read_text(encoding="utf-8")


def test_the_columns_are_all_families():
    from tilestream.kernels.families import FAMILIES

    named = {name for column in COLUMNS for name in column.families}
    assert {family.family for family in FAMILIES} <= named
