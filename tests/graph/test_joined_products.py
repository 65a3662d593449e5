"""Products that a graph has in parts, of odd widths, or by a sum, said otherwise: with the same values."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from eager_regions import trace
from torch import Tensor, fx

from tilestream.graph.rewrites.gelus import join_gelus
from tilestream.graph.rewrites.normal_form import fold_batches, join_biases, open_factors
from tilestream.graph.rewrites.padded_products import LEAST_ROWS, pad_products, pads
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.rewrites.table import Run, rewrite

aten = torch.ops.aten
Make = Callable[..., Tensor]


def normal(*shape: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=dtype)


def rewritten(make: Make, run: Run, *inputs: Tensor) -> tuple[fx.GraphModule, int]:
    """The graph of a function behind a rewrite, which computes the same; how much was changed."""
    graph = trace(make, inputs)
    changed = rewrite(graph, run)
    (got,), want = graph(*inputs), make(*inputs)
    torch.testing.assert_close(got, want)
    assert got.stride() == want.stride()
    return graph, changed


def count(graph: fx.GraphModule, target: object) -> int:
    return len(graph.graph.find_nodes(op="call_function", target=target))  # pyright: ignore


# ---- biases


def apart(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return (x.flatten(0, 1) @ weight.t()).view(2, 5, 6) + bias


def test_a_bias_behind_a_view_is_in_its_product() -> None:
    graph, made = rewritten(apart, join_biases, normal(2, 5, 4), normal(6, 4), normal(6))
    assert made == 1 and count(graph, aten.addmm.default) == 1 and count(graph, aten.add.Tensor) == 0


APART = {
    "a matrix is added": lambda x, w, b: x @ w.t() + b.expand(5, 6),
    "the product is read by others": lambda x, w, b: (y := x @ w.t()) + b + y,
    "added twice": lambda x, w, b: torch.add(x @ w.t(), b, alpha=2),
    "a number": lambda x, w, b: x @ w.t() + 1,
    "other features": lambda x, w, b: (x @ w.t()).view(6, 5) + b[:5],
}


@pytest.mark.parametrize("name", APART)
def test_what_is_no_bias_stays(name: str) -> None:
    _, made = rewritten(APART[name], join_biases, normal(5, 4), normal(6, 4), normal(6))
    assert made == 0


# ---- factors


@pytest.mark.parametrize("scaled", [lambda x, eps: (1 + eps) * x, lambda x, eps: x * (eps + 1)])
@pytest.mark.parametrize("shape", [(1,), ()])
def test_a_number_and_one_is_no_operator_by_itself(scaled: Make, shape: tuple[int, ...]) -> None:
    graph, made = rewritten(scaled, open_factors, normal(5, 4), normal(1).view(shape))
    (total,) = graph.graph.find_nodes(op="call_function", target=aten.add.Tensor)
    assert made == 1 and total.meta["val"].shape == (5, 4)


FACTORS: dict[str, Make] = {
    "a vector": lambda x, eps: (1 + eps.expand(4)) * x,
    "another number": lambda x, eps: (2 + eps) * x,
    "twice one": lambda x, eps: torch.add(eps, 1, alpha=2) * x,
    "read by others": lambda x, eps: (one := 1 + eps) * x + one,
    "of another dtype": lambda x, eps: (1 + eps.float()) * x,
    "the rows are wider behind it": lambda x, eps: (1 + eps) * x[:1, :1].view(()),
}


@pytest.mark.parametrize("name", FACTORS)
def test_other_factors_stay(name: str) -> None:
    assert rewritten(FACTORS[name], open_factors, normal(5, 4), normal(1))[1] == 0


# ---- products of batches


def of_batches(x: Tensor, weight: Tensor) -> Tensor:
    """As PyTorch 2.11 has a linear over another dimension than the last."""
    return torch.bmm(x.transpose(1, 2).expand(3, 4, 5), weight.t().expand(3, 5, 6))


def test_batches_by_one_matrix_are_rows() -> None:
    graph, made = rewritten(of_batches, fold_batches, normal(3, 5, 4), normal(6, 5))
    assert made == 1 and count(graph, aten.mm.default) == 1 and count(graph, aten.bmm.default) == 0


@pytest.mark.parametrize("shape", [(3, 5, 6), (1, 5, 6)])
def test_matrices_of_their_own_stay(shape: tuple[int, int, int]) -> None:
    _, made = rewritten(torch.bmm, fold_batches, normal(shape[0], 4, 5), normal(*shape))
    assert made == 0


# ---- GELU, written out


def written(x: Tensor, half: float = 0.5, cubic: float = 0.044715) -> Tensor:
    return half * x * (1.0 + torch.tanh(math.sqrt(2 / math.pi) * (x + cubic * torch.pow(x, 3.0))))


def test_gelu_that_is_written_out_is_one_operator() -> None:
    graph, made = rewritten(written, join_gelus, normal(5, 4))
    assert made == 1 and count(graph, aten.gelu.default) == 1 and count(graph, aten.tanh.default) == 0
    graph, made = rewritten(lambda x: written(x) + written(x + 1), join_gelus, normal(5, 4))
    assert made == 2


def test_what_is_no_gelu_stays() -> None:
    for make in (lambda x: written(x, half=0.4), lambda x: written(x, cubic=0.05), lambda x: x * (1.0 + torch.tanh(x))):
        _, made = rewritten(make, join_gelus, normal(5, 4))
        assert made == 0


def test_gelu_whose_parts_others_read_stays() -> None:
    def both(x: Tensor) -> Tensor:
        inner = torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * torch.pow(x, 3.0)))
        return 0.5 * x * (1.0 + inner) + inner

    _, made = rewritten(both, join_gelus, normal(5, 4))
    assert made == 0


# ---- odd widths


def odd(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    return torch.addmm(bias, x.relu(), weight.t()).sin()


@pytest.mark.parametrize(("depth", "features"), [(36, 40), (40, 36), (36, 44), (36, 35)])
def test_products_of_odd_width_are_padded(depth: int, features: int) -> None:
    inputs = (normal(LEAST_ROWS, depth), normal(features, depth), normal(features))
    graph, made = rewritten(odd, pad_products, *(t.to(torch.bfloat16) for t in inputs))
    (product,) = graph.graph.find_nodes(op="call_function", target=aten.addmm.default)
    assert made == 1 and all(n % 8 == 0 for m in product.args[1:] for n in m.meta["val"].shape[1:])  # pyright: ignore
    assert not any(map(pads, graph.graph.nodes))
    assert not rewrite(trace(odd, tuple(t.bfloat16() for t in inputs)), pad_products, Settings(library_epilogues=False))


def test_weights_that_lie_inputs_first_are_padded() -> None:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        return (x.relu() @ weight).sin()

    _, made = rewritten(run, pad_products, *(t.bfloat16() for t in (normal(LEAST_ROWS, 36), normal(36, 44))))
    assert made == 1


LEFT = {
    "few rows": (odd, LEAST_ROWS - 1, 36, torch.bfloat16),
    "even": (odd, LEAST_ROWS, 40, torch.bfloat16),
    "float32": (odd, LEAST_ROWS, 36, torch.float32),
    "rows that are given": (lambda x, w, b: torch.addmm(b, x, w.t()), LEAST_ROWS, 36, torch.bfloat16),
    "a returned result of odd width": (lambda x, w, b: x.relu() @ w[:35].t(), LEAST_ROWS, 40, torch.bfloat16),
    "rows together": (lambda x, w, b: (x.relu() @ w[:36].t()).view(-1).sin(), LEAST_ROWS, 40, torch.bfloat16),
}


@pytest.mark.parametrize("name", LEFT)
def test_other_products_stay(name: str) -> None:
    make, rows, depth, dtype = LEFT[name]
    inputs = (normal(rows, depth), normal(64, depth), normal(64))
    _, made = rewritten(make, pad_products, *(t.to(dtype) for t in inputs))
    assert made == 0
