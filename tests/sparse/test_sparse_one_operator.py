"""Every module of one operator runs with PyTorch's values or is refused, as docs/sparse-operators.md says."""

from __future__ import annotations

import importlib
import warnings

import pytest
from places import DOCS
from sparse_one_operator import MODULES, One, outcome

PAGE = DOCS / "sparse-operators.md"
script = importlib.import_module("benchmarks.tables.sparse_operators")
LISTED = script.listed(PAGE.read_text(encoding="utf-8"))


def found(one: One, sparse: bool, fuse: str):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return outcome(one, sparse, fuse)


@pytest.mark.parametrize("one", MODULES, ids=lambda one: one.name)
@pytest.mark.every(3)
def test_a_module_does_what_the_page_says(one: One):
    """Every other one with a sparse input."""
    said = LISTED[one.name]
    made = found(one, sparse=not said.refused and MODULES.index(one) % 2 == 1, fuse="all")
    assert made.refused == said.refused
    assert bool(made.eager) == bool(said.eager)


@pytest.mark.smoke
def test_the_page_counts_what_it_lists():
    """And nothing that it does not: at most 40 of the modules are refused, and 160 run at least."""
    assert set(LISTED) == {one.name for one in MODULES}
    text = PAGE.read_text(encoding="utf-8")
    assert script.page(text, LISTED) == text, "run python -m benchmarks.tables.sparse_operators"
    refused = sum(1 for one in LISTED.values() if one.refused)
    assert refused <= 40 and len(LISTED) - refused >= 160


@pytest.mark.exhaustive
@pytest.mark.parametrize("fuse", ["none", "all"])
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize("one", MODULES, ids=lambda one: one.name)
def test_a_module_has_the_values_of_pytorch(one: One, sparse: bool, fuse: str):
    found(one, sparse, fuse)
