"""What results say of our compiler's choices."""

from __future__ import annotations

import logging

from benchmarks.lib.choices import CHOOSER, choices
from tilestream.devices import get
from tilestream.options import Options
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.plan.chooser import Question, choose


def test_each_choice_is_a_line_with_its_times() -> None:
    candidates = Candidate("vertical", None, 3.0, operator="ours"), Candidate(FALLBACK, None, 5.0)
    question = Question("attention", 0, get("h200"), lambda: [], lambda: candidates)
    before = logging.getLogger(CHOOSER).level
    lines: list[str] = []
    with choices(lines):
        choose(question, Options(cache=False), None)
    choose(question, Options(cache=False), None)
    assert lines == ["attention: vertical, 3.0 us predicted; fallback 5.0 us predicted; h200"]
    assert logging.getLogger(CHOOSER).level == before
