"""The troubleshooting page knows every error, and quotes messages that the code really has."""

from __future__ import annotations

import inspect
import re

import pytest
from places import ROOT

import tilestream
from tilestream import errors

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
CLASSES = {n for n, c in vars(errors).items() if inspect.isclass(c) and issubclass(c, errors.TilestreamError)}


def table(heading: str) -> dict[str, list[str]]:
    """The rows of a section's table: first cell to the others."""
    section = re.split(r"^## ", PAGE.split(f"## {heading}\n")[1], flags=re.MULTILINE)[0]
    rows = [line.strip("|").split(" | ") for line in section.splitlines() if line.startswith("|")][2:]
    return {first.strip(): [c.strip() for c in rest] for first, *rest in rows}


def test_every_error_has_a_row_with_cause_and_remedy():
    rows = table("Errors")
    assert set(rows) == {f"`{name}`" for name in CLASSES}
    for name, cells in rows.items():
        assert len(cells) == 2 and all(len(cell) > 10 for cell in cells), name


def test_every_error_can_be_caught_by_its_public_name():
    assert set(tilestream.__all__) >= CLASSES


@pytest.mark.parametrize("warning", [w for cell in table("Warnings, and what they mean") for w in cell.split("`, `")])
def test_quoted_warnings_are_in_the_source(warning: str):
    """Their words, that is: what stands for a name or a number is left out."""
    source = "".join(p.read_text() for p in (ROOT / "src" / "tilestream").rglob("*.py"))
    words = [w.strip() for w in re.split(r"\.\.\.|regionK|\bN\b|\bM\b|\(|\)", warning.strip("`"))]
    for part in filter(None, words):
        pattern = re.escape(part).replace("of\\ operators", "of")
        assert re.search(pattern, source), f"no message has {part!r}"


def test_the_timeout_is_the_one_in_the_code():
    from tilestream.kernels.parts.params import TIMEOUT_NS

    found = re.search(r"\((\d+) seconds? for one tile\)", PAGE)
    assert found is not None and int(found[1]) * 10**9 == TIMEOUT_NS


def test_the_dump_on_the_page_is_what_the_code_prints():
    from tilestream.kernels.stream.kernel import told
    from tilestream.kernels.stream.tables import QueueSpec, Tables

    queues = [
        QueueSpec("code", "bf16", 128, 4, ("hidden", "head"), 0, ""),
        QueueSpec("features", "bf16", 128, 4, ("head",), 12, "model.py:31"),
    ]
    tables = Tables(queues=queues)
    tables.lines = 20
    words = [0] * (5 + tables.lines)
    launch = 7 << 32
    # stage and SM, queue and tile, as pairs of 32-bit words: low half first
    words[0], words[1], words[2] = 1 | 2 << 32, 41 | 1 << 32, 1205
    words[3], words[4] = launch | 1206, launch | 1202
    heads = [1206, 1206, 1202, 1205, 1201]
    for group, head in enumerate(heads):
        for slot in range(4):
            words[5 + 4 * group + slot] = launch | (head - slot)
    for line in told(tables, ["encode", "hidden", "head"], words).splitlines():
        assert line.strip() in PAGE, line
