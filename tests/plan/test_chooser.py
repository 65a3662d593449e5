"""One rule for all that is chosen: what is timed, what wins, what is kept; and margins that say where they are from."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from tilestream.devices import get
from tilestream.errors import CompileError, PlanError
from tilestream.options import Options
from tilestream.plan import chooser, margins
from tilestream.plan.candidates import FALLBACK, Candidate
from tilestream.plan.chooser import Measure, NotTimedNow, Question, alternative, choose, decide, kept

H200 = get("h200")
UNKEPT = Options(cache=False)


@dataclass(frozen=True)
class Kind:
    rows: int


def of(us: float | Exception, present_us: float | Exception) -> Measure:
    return lambda wanted: [present_us if c.strategy == FALLBACK else us for c in wanted]


@pytest.mark.parametrize(
    ("us", "present_us", "wins"),
    [
        (9.8, 10.0, True),
        (9.95, 10.0, False),
        (CompileError("spills", "report it"), 10.0, False),
        (9.8, RuntimeError("no kernel"), True),
        (CompileError("spills", "report it"), RuntimeError("no kernel"), False),
    ],
)
def test_what_is_timed_decides(us: float | Exception, present_us: float | Exception, wins: bool) -> None:
    """Predictions say the opposite. What could not be timed never takes the fallback's place."""
    made = decide(alternative("ours", Kind(1), H200, (10.0, 1.0)), of(us, present_us))
    assert made.wins is wins
    assert [bool(c.rejected) for c in made.candidates] == [isinstance(x, Exception) for x in (us, present_us)]


@pytest.mark.parametrize(
    ("predicted_us", "wins"), [((9.9, 10.0), True), ((10.0, 10.0), False), ((None, None), False), ((1.0, None), True)]
)
def test_what_is_predicted_decides_where_nothing_is_timed(
    predicted_us: tuple[float | None, float | None], wins: bool
) -> None:
    assert decide(alternative("ours", Kind(1), H200, predicted_us)).wins is wins


def test_what_is_forced_runs_or_says_why_not() -> None:
    assert decide(alternative("ours", Kind(1), H200, (10.0, 1.0), forced=True)).wins
    refused = Candidate("ours", None, None, rejected="too wide"), Candidate(FALLBACK, None, None)
    asked = Question("x", 1, H200, lambda: None, lambda: refused, True, refusal="x has no kernel", remedy="narrow it")
    with pytest.raises(PlanError, match="x has no kernel: ours: too wide"):
        decide(asked)


def test_nothing_is_timed_where_there_is_no_choice() -> None:
    refused = Candidate("ours", None, None, rejected="too wide"), Candidate(FALLBACK, None, None)
    assert not decide(Question("x", 1, H200, lambda: None, lambda: refused), of(RuntimeError(), RuntimeError())).wins


def test_a_fallback_that_is_not_timed_does_not_run() -> None:
    """As of a whole graph whose regions gain enough: its order of timing rejects the other."""

    def order(candidates: Sequence[Candidate], _: object) -> Sequence[Candidate]:
        ours, _other = candidates
        return [ours, Candidate(FALLBACK, None, None, rejected="not timed: enough is gained")]

    pair = Candidate("ours", None, None, operator="ours"), Candidate(FALLBACK, None, None)
    asked = Question("x", 1, H200, lambda: None, lambda: pair, order=order)
    assert decide(asked, of(1.0, 1.0)).wins


def test_a_plan_is_asked_for_once(tmp_path: Path) -> None:
    """By the process, then by the next from the disk; other questions, devices and ways of deciding have their own."""
    options, asked = Options(cache_dir=tmp_path), []

    def measure(wanted: Sequence[Candidate]) -> list[float | Exception]:
        asked.append([c.name for c in wanted])
        return of(1.0, 2.0)(wanted)

    question = alternative("ours", Kind(1), H200)
    made = choose(question, options, measure)
    assert choose(question, options, measure) is made
    chooser.forget()
    assert choose(question, options, measure) == made == kept(question, options, measured=True)
    assert asked == [["ours", FALLBACK]] and kept(question, options, measured=False) is None
    others = [alternative("ours", Kind(2), H200), alternative("other", Kind(1), H200)]
    others += [alternative("ours", Kind(1), get("h100")), alternative("ours", Kind(1), H200, forced=True)]
    assert len({q.key(measured) for q in (question, *others) for measured in (True, False)}) == 10


def test_what_could_not_be_timed_now_is_asked_again(tmp_path: Path) -> None:
    options, question = Options(cache_dir=tmp_path), alternative("ours", Kind(1), H200)
    assert not choose(question, options, of(NotTimedNow("memory is short", "free some"), 2.0)).wins
    assert not choose(question, options, of(1.0, 2.0)).wins, "it serves its process"
    chooser.forget()
    assert choose(question, options, of(1.0, 2.0)).wins


def test_what_is_gained_is_measured_or_else_predicted() -> None:
    question = alternative("ours", Kind(1), H200, (3.0, 10.0))
    assert decide(question).gain_us == 7.0 and decide(question, of(4.0, 5.0)).gain_us == 1.0
    assert decide(alternative("ours", Kind(1), H200)).gain_us == 0.0


def test_every_margin_says_where_it_is_from() -> None:
    """By a string behind it that names a measurement, or calls it assumed."""
    body = ast.parse(inspect.getsource(margins)).body[1:]
    assert len(body) % 2 == 0
    for value, told in zip(body[::2], body[1::2], strict=True):
        assert isinstance(value, ast.Assign) and isinstance(told, ast.Expr) and isinstance(told.value, ast.Constant)
        text = str(told.value.value)
        assert re.search(r"Assumed:|benchmarks/|docs/|timed|gained", text), ast.unparse(value)
