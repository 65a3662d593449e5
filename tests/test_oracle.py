"""The oracle: relative errors, special values, and the tolerance rule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tilestream.run import oracle


def test_error_is_relative():
    exact = torch.tensor([3.0, 4.0], dtype=torch.float64)
    assert oracle.error(torch.tensor([3.0, 4.5]), exact) == pytest.approx(0.1)
    assert oracle.error(torch.tensor([3.0, 4.0]), exact) == 0.0
    assert oracle.error(torch.zeros(0), torch.zeros(0, dtype=torch.float64)) == 0.0


def test_shapes_must_agree():
    assert oracle.error(torch.zeros(2), torch.zeros(3, dtype=torch.float64)) == float("inf")


@pytest.mark.parametrize("special", [float("nan"), float("inf"), -float("inf")])
def test_special_values_must_agree_in_place(special: float):
    exact = torch.tensor([1.0, special], dtype=torch.float64)
    assert oracle.error(torch.tensor([1.0, special]), exact) == 0.0
    assert oracle.error(torch.tensor([special, 1.0]), exact) == float("inf")
    assert oracle.error(torch.tensor([1.0, 1.0]), exact) == float("inf")


def test_overflow_counts_as_infinity():
    exact = torch.tensor([1.0, 1e6], dtype=torch.float64)
    assert oracle.error(torch.tensor([1.0, float("inf")], dtype=torch.float16), exact) == 0.0
    assert oracle.error(torch.tensor([1.0, 65504.0], dtype=torch.float16), exact) == float("inf")


@given(st.floats(0, 1), st.sampled_from([torch.bfloat16, torch.float16, torch.float32]))
def test_tolerance_is_twice_eagers_error(own: float, dtype: torch.dtype):
    assert oracle.tolerance(own, dtype) == max(2 * own, torch.finfo(dtype).eps / 2)


def test_judge():
    exact = torch.randn(1000, dtype=torch.float64)
    eager = exact.bfloat16()
    assert oracle.judge([eager], [eager], [exact])[2]
    assert not oracle.judge([eager * 1.02], [eager], [exact])[2]
    assert not oracle.judge([], [eager], [exact])[2]


def test_both_parts_of_complex_numbers_count():
    ref = torch.tensor([3 + 4j], dtype=torch.complex128)
    assert oracle.error(ref.to(torch.complex64), ref) == 0.0
    assert oracle.error(torch.tensor([3 - 4j], dtype=torch.complex64), ref) == pytest.approx(8 / 5)
    assert oracle.error(torch.tensor([3.0]), ref) == float("inf")
