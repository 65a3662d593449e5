"""Lanes: cycles of the reference, values for every count, and nested lanes."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_sparse_lower import DCSR, close, hashed

from tilestream.sparse.program import compile_einsum
from tilestream.sparse.schedule import Schedule
from tilestream.sparse.storage import pack


def matmul(b, c, order, lanes):
    operands = [pack("B", b, DCSR), pack("C", c, DCSR)]
    return compile_einsum("ik,kj->ij", operands, Schedule(order=order, parallel=lanes))


@pytest.mark.parametrize(("d", "reference"), [(20, 1096), (4, 4276)])
def test_two_lanes_of_rows(d, reference):
    b, c = hashed(50, d, 1), hashed(50, d, 2)
    result = matmul(b, c, ("i", "k", "j"), {"i": 2}).run(engine="fast")
    close(result.cycles, reference)
    np.testing.assert_array_equal(result.output, b @ c)


def test_graph_has_the_fork_the_copies_and_the_joins():
    graph = matmul(np.eye(4), np.eye(4), ("i", "k", "j"), {"i": 3}).regions[0].graph
    kinds = [node.kind for node in graph.nodes]
    assert kinds.count("fork") == 1 and kinds.count("join") == 2 and kinds.count("spacc") == 3
    assert [n.attr("ways") for n in graph.nodes if n.kind == "fork"] == [3]


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 6), st.integers(1, 6), st.sampled_from([("i", "k", "j"), ("i", "j", "k"), ("k", "i", "j")]))
def test_any_number_of_lanes(outer, inner, order):
    """Fiber counts that the lanes do not divide, lanes without work, and lanes in lanes."""
    b, c = hashed(7, 3, 1), hashed(7, 3, 2)
    result = matmul(b, c, order, {order[0]: outer, order[1]: inner}).run(engine="spec")
    np.testing.assert_array_equal(result.output, b @ c)


def test_lanes_shorten_the_run_until_the_join_is_the_slowest():
    b, c = hashed(50, 4, 1), hashed(50, 4, 2)
    cycles = [matmul(b, c, ("i", "k", "j"), {"i": n}).run(engine="fast").cycles for n in (1, 2, 4, 8)]
    assert cycles[0] > 1.8 * cycles[1] and cycles[1] > cycles[2] >= cycles[3] >= 2372
