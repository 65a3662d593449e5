"""The paper's integer program: its optimum, its limits, and the closed form against scipy's solver."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilestream.errors import PlanError
from tilestream.plan.spatial.balance import Load, balance
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


def test_more_stages_than_sms():
    with pytest.raises(PlanError, match="5 simt stages do not fit on 4 SMs"):
        balance([Load(str(i), SIMT, 1.0, 9) for i in range(5)], 4)


def test_a_stage_without_work_takes_one_cta_and_limits_nothing():
    made = balance([Load("free", SIMT, 0.0, 1), Load("a", SIMT, 1.0, 99)], 8)
    assert made.ctas["free"] == 1 and made.limit == "a"
    assert balance([Load("free", SIMT, 0.0, 1)], 8).passes_per_s == math.inf


@settings(max_examples=60, deadline=None)
@given(
    st.lists(
        st.tuples(st.sampled_from([TENSOR, SIMT]), st.floats(0.01, 10), st.integers(1, 40)), min_size=1, max_size=7
    ),
    st.integers(7, 40),
)
def test_giving_to_the_slowest_is_the_integer_programs_optimum(parts, sms):
    loads = [Load(f"s{i}", engine, seconds, most) for i, (engine, seconds, most) in enumerate(parts)]
    quick, exact = balance(loads, sms), balance(loads, sms, exact=True)
    assert quick.passes_per_s == pytest.approx(exact.passes_per_s, rel=1e-4)
    for made in (quick, exact):
        for engine in Engine:
            used = [made.ctas[x.name] for x in loads if x.engine is engine]
            assert sum(used) <= sms
            usable = sum(x.most for x in loads if x.engine is engine)
            assert not used or sum(used) == min(sms, usable)
        assert all(1 <= made.ctas[x.name] <= x.most for x in loads)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.floats(0.01, 10), min_size=1, max_size=9), st.integers(9, 60))
def test_more_sms_are_never_slower(seconds, sms):
    loads = [Load(f"s{i}", TENSOR, s, 10**6) for i, s in enumerate(seconds)]
    assert balance(loads, 2 * sms).passes_per_s >= balance(loads, sms).passes_per_s
    # Not above what whole CTAs could ever reach: the machine's rate without rounding.
    assert balance(loads, sms).passes_per_s <= sms / sum(seconds) * (1 + 1e-9)
