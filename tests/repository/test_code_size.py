"""The code stays within its budget, and is counted as the budget says."""

from __future__ import annotations

import pytest

from benchmarks import code_size

pytestmark = pytest.mark.smoke


@pytest.mark.parametrize("group", code_size.budget(), ids=lambda group: group.name)
def test_code_stays_under_its_ceiling(group: code_size.Group) -> None:
    assert 0 < group.lines <= group.ceiling, f"{group.lines} lines; benchmarks/code_budget.toml has the ceiling"


def test_every_folder_of_the_package_has_a_ceiling() -> None:
    counted = {folder for group in code_size.budget() if group.language == "python" for folder in group.folders}
    folders = {p.name for p in code_size.PACKAGE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert folders == counted


def test_documentation_comments_and_blank_lines_are_no_code() -> None:
    text = '''"""A module
of two lines."""

# a comment
NAME = """a text
that is a value"""
"""What it is."""


def function(
    first: int,
) -> str:
    """Docstring."""

    return "one" "two"  # a comment
'''
    assert code_size.python_lines(text) == 2 + 3 + 1
