"""The graph of operators itself: who makes and reads what, and what it refuses."""

from __future__ import annotations

import pytest

from tilestream.errors import CaptureError
from tilestream.simulator.workload import Engine
from tilestream.studies.kitsune.operators import Kind, Operand, Operator, OperatorGraph, Value


def op(name: str, reads: list[str], *writes: str, size: float = 8.0, touched: float | None = None) -> Operator:
    operands = tuple(Operand(value, (4,), size, size if touched is None else touched) for value in reads)
    return Operator(
        name,
        "aten.add.Tensor",
        "add",
        Kind.ELEMENTWISE,
        Engine.SIMT,
        "forward",
        operands,
        writes,
        (size,) * len(writes),
    )


def values(*names: str, inputs: str = "x") -> dict[str, Value]:
    return {n: Value(n, (4,), "bf16", 8, is_input=n in inputs) for n in names}


def diamond() -> OperatorGraph:
    ops = (op("a", ["x"], "va"), op("b", ["va"], "vb"), op("c", ["va"], "vc"), op("d", ["vb", "vc", "va"], "vd"))
    return OperatorGraph("diamond", "inference", ops, values("x", "va", "vb", "vc", "vd"))


def test_neighbours() -> None:
    graph = diamond()
    assert graph.producer("x") is None and graph.producer("vb") is graph["b"]
    assert [c.name for c in graph.consumers("va")] == ["b", "c", "d"] and graph.consumers("vd") == ()
    assert [p.name for p in graph.predecessors(graph["d"])] == ["b", "c", "a"]
    assert [s.name for s in graph.successors(graph["a"])] == ["b", "c", "d"]
    assert [o.name for o in graph] == ["a", "b", "c", "d"] and len(graph) == 4


def test_a_value_that_is_read_twice_counts_once() -> None:
    twice = op("a", ["x", "x", "y"], "v", size=8.0, touched=32.0)
    assert (twice.bytes_read, twice.bytes_written, twice.bytes) == (16.0, 8.0, 24.0)


def test_a_graph_sums_over_its_operators() -> None:
    graph = diamond()
    assert graph.bytes == sum(o.bytes for o in graph) == 16 + 16 + 16 + 32
    assert [o.name for o in graph.phase("forward")] == ["a", "b", "c", "d"] and graph.phase("backward") == ()
    assert str(graph).splitlines()[0].startswith("diamond, inference: 4 operators")
    assert len(str(graph).splitlines()) == 5


def test_reading_what_nobody_made_is_refused() -> None:
    with pytest.raises(CaptureError, match="'b'.*reads 'va', which nothing made before"):
        OperatorGraph("g", "inference", (op("b", ["va"], "vb"), op("a", ["x"], "va")), values("x", "va", "vb"))


def test_two_producers_of_one_value_are_refused() -> None:
    with pytest.raises(CaptureError, match="va of g has two producers"):
        OperatorGraph("g", "inference", (op("a", ["x"], "va"), op("b", ["x"], "va")), values("x", "va"))
