"""The estimate: exact where nothing is assumed, close where it is, and its Pareto fronts."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilestream.errors import SparseError
from tilestream.sparse import graphs, kernels, pareto, run_spec
from tilestream.sparse.kernels import Kernel
from tilestream.sparse.orders.heuristic import estimate


def _both(kernel: Kernel, arrays: dict[str, np.ndarray], shape: tuple[int, ...]):
    return estimate(kernel.graph, kernel.tensors(arrays)), kernel.run(run_spec.run, arrays, shape)


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 12), share=st.floats(0, 1), seed=st.integers(0, 99))
def test_a_product_of_rows_is_counted_exactly(n: int, share: float, seed: int) -> None:
    """In the order ikj only one operand of the intersection varies: what meets is known, and so are all sums."""
    random = np.random.default_rng(seed)
    arrays = {t: random.random((n, n)) * (random.random((n, n)) < share) for t in "BC"}
    expected, ran = _both(kernels.matmul("ikj"), arrays, (n, n))
    assert expected.flops == pytest.approx(ran.flops)
    by_name = {e.name: e for e in expected.nodes}
    for node in ran.nodes:
        if node.kind in ("scan", "array", "alu"):
            assert by_name[node.name].bytes == pytest.approx(node.bytes_read)
            assert by_name[node.name].flops == pytest.approx(node.flops)


@pytest.mark.parametrize("order", ["ijk", "ikj", "jik", "jki", "kij", "kji"])
@pytest.mark.every(2)
def test_every_order_is_close_on_random_operands(order: str) -> None:
    arrays = {"B": kernels.hashed(50, 4, 1), "C": kernels.hashed(50, 4, 2)}
    expected, ran = _both(kernels.matmul(order), arrays, (50, 50))
    assert expected.flops == pytest.approx(ran.flops, rel=0.03)
    assert expected.bytes == pytest.approx(ran.bytes, rel=0.03)
    assert expected.cycles == pytest.approx(ran.cycles, rel=0.05)


@pytest.mark.parametrize("kernel", [kernels.chain(), kernels.matmul_parallel(4), kernels.elementwise("add")])
def test_chains_lanes_and_unions_are_close(kernel: Kernel) -> None:
    arrays = {t: kernels.hashed(50, 4, s) for s, t in enumerate("BCW", 1)}
    expected, ran = _both(kernel, {k: arrays[k] for k in kernel.formats}, (50, 50))
    assert expected.flops == pytest.approx(ran.flops, rel=0.05)
    assert expected.bytes == pytest.approx(ran.bytes, rel=0.05)
    assert expected.cycles == pytest.approx(ran.cycles, rel=0.1)


def test_hubs_are_visited_as_often_as_they_are_linked() -> None:
    """Twice over a graph's links: a mean degree would be far off, walks of two edges are what counts."""
    graph = graphs.like("cora", scale=0.1)
    a = graph.adjacency.toarray()
    expected, ran = _both(kernels.matmul("ikj"), {"B": a, "C": a}, a.shape)
    products = {e.name: e.flops for e in expected.nodes}["mul"]
    assert products == ran.node("mul").flops == graph.two_paths
    mean = graph.edges**2 / graph.nodes
    assert mean < 0.8 * graph.two_paths


def test_what_one_graph_writes_another_one_can_be_estimated_on() -> None:
    arrays = {"B": kernels.hashed(50, 4, 1), "C": kernels.hashed(50, 4, 2), "W": kernels.hashed(50, 4, 3)}
    first = kernels.matmul("ikj")
    made = estimate(first.graph, first.tensors(arrays)).outputs["X"]
    again = estimate(first.graph, {"B": made, "C": first.tensors({**arrays, "C": arrays["W"]})["C"]})
    ran = first.run(run_spec.run, {"B": arrays["B"] @ arrays["C"], "C": arrays["W"]}, (50, 50))
    assert again.flops == pytest.approx(ran.flops, rel=0.03)
    assert again.cycles == pytest.approx(ran.cycles, rel=0.05)


def test_a_missing_tensor_is_named() -> None:
    kernel = kernels.matmul("ikj")
    with pytest.raises(SparseError, match="'B'"):
        estimate(kernel.graph, {})


points = st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(0, 5)), max_size=20)


@given(points)
def test_the_front_is_what_nothing_dominates(found: list[tuple[int, int, int]]) -> None:
    front = pareto.front(found, lambda p: p)
    assert len(set(front)) == len(front)
    for p in found:
        dominated = any(pareto.dominates(q, p) for q in found)
        assert (p in front) != dominated


def test_the_picture_has_every_point() -> None:
    svg = pareto.plot([("a<b", 10, 20, 1, True), ("c", 100, 2, 5, False)], ("cycles", "bytes", "memory"))
    assert svg.count("<circle") == 2 and "a&lt;b" in svg and "<b " not in svg
