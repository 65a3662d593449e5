"""The paper's integer program: its optimum, its limits, and the closed form against scipy's solver."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import Bounds, LinearConstraint, milp

from tilestream.errors import PlanError
from tilestream.plan.balance import Load, balance
from tilestream.simulator.workload import Engine

TENSOR, SIMT = Engine.TENSOR, Engine.SIMT


def test_ctas_follow_the_loads_and_each_class_fills_the_machine():
    made = balance([Load("a", TENSOR, 1.0, 999), Load("b", TENSOR, 3.0, 999), Load("c", SIMT, 0.1, 999)], 108)
    assert made.ctas == {"a": 27, "b": 81, "c": 108}
    assert made.passes_per_s == pytest.approx(27) and made.limit in ("a", "b")


def test_memory_limits_the_rate():
    loads = [Load("a", TENSOR, 1.0, 999)]
    assert balance(loads, 100, dram_s=0.5).limit == "dram"
    assert balance(loads, 100, dram_s=0.5, l2_s=2.0).passes_per_s == pytest.approx(0.5)
    assert balance(loads, 100, dram_s=1e-3).limit == "a"


def test_no_cta_without_a_tile():
    made = balance([Load("few", SIMT, 9.0, 2), Load("many", SIMT, 1.0, 999)], 10)
    assert made.ctas == {"few": 2, "many": 8} and made.limit == "few"


def test_only_so_many_ctas_as_a_stage_can_have():
    """The slowest stage takes them in leaps; what it cannot take another one may."""
    made = balance([Load("leaps", SIMT, 9.0, 99, (1, 4, 8, 16)), Load("any", SIMT, 1.0, 99)], 14)
    assert made.ctas == {"leaps": 8, "any": 6}


def test_more_stages_than_sms():
    with pytest.raises(PlanError, match="5 simt stages do not fit on 4 SMs"):
        balance([Load(str(i), SIMT, 1.0, 9) for i in range(5)], 4)


def test_a_stage_without_work_takes_one_cta_and_limits_nothing():
    made = balance([Load("free", SIMT, 0.0, 1), Load("a", SIMT, 1.0, 99)], 8)
    assert made.ctas["free"] == 1 and made.limit == "a"
    assert balance([Load("free", SIMT, 0.0, 1)], 8).passes_per_s == math.inf


def program(part: list[Load], sms: int) -> dict[str, int]:
    """The integer program of one class, by a solver."""
    n = len(part)
    scale = max(x.seconds for x in part) or 1.0
    most = np.array([float(max(1, min(x.most, sms))) for x in part])
    # Unknowns: CTAs of each stage, then T in passes per ``scale`` seconds.
    rates = np.hstack([-np.diag([1.0] * n), np.array([[x.seconds / scale] for x in part])])
    given = min(float(sms), most.sum())
    total = np.array([[1.0] * n + [0.0]])
    solved = milp(
        np.array([0.0] * n + [-1.0]),
        constraints=[LinearConstraint(rates, -np.inf, 0.0), LinearConstraint(total, given, given)],
        integrality=np.array([1] * n + [0]),
        bounds=Bounds(np.array([1.0] * n + [0.0]), np.append(most, np.inf)),  # pyright: ignore[reportArgumentType]
    )
    assert solved.x is not None, solved.message
    return {x.name: int(round(v)) for x, v in zip(part, solved.x[:n], strict=True)}


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([TENSOR, SIMT]), st.floats(0.01, 10), st.integers(1, 40)), min_size=1, max_size=7
    ),
    st.integers(7, 40),
)
def test_giving_to_the_slowest_is_the_integer_programs_optimum(parts, sms):
    loads = [Load(f"s{i}", engine, seconds, most) for i, (engine, seconds, most) in enumerate(parts)]
    quick = balance(loads, sms).ctas
    for engine in Engine:
        part = [x for x in loads if x.engine is engine]
        if not part:
            continue
        exact = program(part, sms)
        slowest = [max(x.seconds / ctas[x.name] for x in part) for ctas in (quick, exact)]
        assert slowest[0] == pytest.approx(slowest[1], rel=1e-4)
        assert sum(quick[x.name] for x in part) == min(sms, sum(x.most for x in part))
    assert all(1 <= quick[x.name] <= x.most for x in loads)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=9), st.integers(9, 60))
def test_more_sms_are_never_slower(seconds, sms):
    loads = [Load(f"s{i}", TENSOR, s, 10**6) for i, s in enumerate(seconds)]
    assert balance(loads, 2 * sms).passes_per_s >= balance(loads, sms).passes_per_s
    # Not above what whole CTAs could ever reach: the machine's rate without rounding.
    assert balance(loads, sms).passes_per_s <= sms / sum(seconds) * (1 + 1e-9)
