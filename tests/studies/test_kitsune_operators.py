"""The graph of operators itself: who makes and reads what, which nodes each is, and what it refuses."""

from __future__ import annotations

from dataclasses import replace

import pytest
from operator_graphs import Builder

from tilestream.errors import CaptureError
from tilestream.studies.kitsune.compiler.operators import Operand, OperatorGraph


def diamond() -> OperatorGraph:
    b = Builder("diamond")
    a = b.act("a", b.input("x", 4))
    b.binary("d", b.binary("bc", b.act("b", a), b.act("c", a)), a)
    return b.graph()


def test_neighbours() -> None:
    graph = diamond()
    assert graph.producer("x") is None and graph.producer("b") is graph["b"]
    assert [c.name for c in graph.consumers("a")] == ["b", "c", "d"] and graph.consumers("d") == ()
    assert [p.name for p in graph.predecessors(graph["d"])] == ["bc", "a"]
    assert [s.name for s in graph.successors(graph["a"])] == ["b", "c", "d"]
    assert [o.name for o in graph] == ["a", "b", "c", "bc", "d"] and len(graph) == 5


def test_every_operator_is_nodes_of_the_captured_graph() -> None:
    graph = diamond()
    assert [[n.name for n in op.nodes] for op in graph] == [["a"], ["b"], ["c"], ["bc"], ["d"]]
    assert {n.graph for op in graph for n in op.nodes} == {graph.recorded.forward}


def test_a_value_that_is_read_twice_counts_once() -> None:
    (op,) = diamond().phase("forward")[:1]
    x, y = (Operand(name, (4,), 8.0, 32.0) for name in "xy")
    twice = replace(op, inputs=(x, x, y))
    assert (twice.bytes_read, twice.bytes_written, twice.bytes) == (16.0, 8.0, 24.0)


def test_a_graph_sums_over_its_operators() -> None:
    graph = diamond()
    assert graph.bytes == sum(o.bytes for o in graph) == 16 + 16 + 16 + 24 + 24
    assert [o.name for o in graph.phase("forward")] == [o.name for o in graph] and graph.phase("backward") == ()
    assert str(graph).splitlines()[0].startswith("diamond, inference: 5 operators")
    assert len(str(graph).splitlines()) == 6


def test_reading_what_nobody_made_is_refused() -> None:
    graph = diamond()
    with pytest.raises(CaptureError, match="'b'.*reads 'a', which nothing made before"):
        replace(graph, operators=graph.operators[1:])


def test_two_producers_of_one_value_are_refused() -> None:
    graph = diamond()
    again = replace(graph["a"], name="again")
    with pytest.raises(CaptureError, match="a of diamond has two producers"):
        replace(graph, operators=(graph["a"], again))
