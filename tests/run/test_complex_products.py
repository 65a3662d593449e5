"""Complex products as arithmetic of real numbers: which, and that they compute the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from eager_regions import trace
from torch import Tensor

from tilestream.apps import llama
from tilestream.graph.rewrites.complex_products import multiply_reals
from tilestream.graph.rewrites.table import rewrite

aten = torch.ops.aten


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    return llama.rotate(x, turn)


def by_itself(x: Tensor, turn: Tensor) -> Tensor:
    numbers = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(numbers * numbers)


def swapped(x: Tensor, turn: Tensor) -> Tensor:
    numbers = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)))
    return torch.view_as_real(turn[:, None] * numbers)


@pytest.mark.parametrize("run", [rotated, by_itself, swapped])
def test_a_complex_product_computes_the_same_without_complex_numbers(run: Callable[[Tensor, Tensor], Tensor]):
    inputs = (torch.randn(2, 3, 4, 16).bfloat16(), llama.rotations(3, 16, 10_000.0))
    graph = trace(run, inputs)
    (want,) = graph(*inputs)
    assert rewrite(graph, multiply_reals) == 1
    assert not graph.graph.find_nodes(op="call_function", target=aten.view_as_complex.default)
    (got,) = graph(*inputs)
    assert got.dtype == want.dtype and got.shape == want.shape
    torch.testing.assert_close(got, want)


def conjugated(x: Tensor, turn: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) + turn[:, None])


def used_twice(x: Tensor, turn: Tensor) -> Tensor:
    product = torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * turn[:, None]
    return torch.view_as_real(product).sum() + product.abs().sum()


def by_a_number(x: Tensor, turn: Tensor) -> Tensor:
    return torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * 2.0)


@pytest.mark.parametrize("run", [conjugated, used_twice, by_a_number])
def test_other_complex_operators_are_left_alone(run: Callable[[Tensor, Tensor], Tensor]):
    graph = trace(run, (torch.randn(2, 3, 4, 16), llama.rotations(3, 16, 10_000.0)))
    assert rewrite(graph, multiply_reals) == 0
