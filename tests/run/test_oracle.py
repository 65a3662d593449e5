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


ENDS = torch.tensor([2, 2, 9], dtype=torch.int32)  # the second group is empty


@pytest.mark.parametrize(
    "shapes", [((9, 8), (3, 8, 16)), ((3, 5, 8), (8, 9)), ((5, 9), (9, 8)), ((3, 5, 8), (3, 8, 6))]
)
def test_products_of_groups_in_float64(shapes: tuple[tuple[int, ...], tuple[int, ...]]):
    """Torch has no kernel for them: those of a mixture's experts, by rows, columns, and what is summed."""
    left, right = (torch.randn(shape).bfloat16() for shape in shapes)
    ends = None if len(shapes[0]) == len(shapes[1]) == 3 else ENDS
    with pytest.raises(RuntimeError):
        torch.ops.aten._grouped_mm(left.double(), right.double(), offs=ends)
    with oracle.Float64():
        exact = torch.ops.aten._grouped_mm(left, right, offs=ends)
    assert exact.dtype == torch.float64
    groups = []
    for i, (first, last) in enumerate([(0, 2), (2, 2), (2, 9)]):
        if ends is None:
            groups.append(left[i].double() @ right[i].double())
        elif left.dim() == right.dim():
            groups.append(left[:, first:last].double() @ right[first:last].double())
        elif left.dim() == 2:
            groups.append(left[first:last].double() @ right[i].double())
        else:
            groups.append(left[i].double() @ right[:, first:last].double())
    joined = torch.stack(groups) if exact.dim() == 3 else torch.cat(groups, 0 if left.dim() == 2 else 1)
    assert torch.equal(exact, joined)
