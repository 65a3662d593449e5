"""Off-chip bytes of subgraphs: counted by hand, and laws that hold for any graph."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from operator_graphs import Builder, mlp, nerf, trained_mlp
from test_kitsune_selection import random_graphs, select_vertical

from tilestream.studies.kitsune.compiler.selection import select
from tilestream.studies.kitsune.compiler.traffic import launch_bytes, reduction, traffic


def test_bulk_reads_and_writes_everything():
    graph = mlp(rows=100, sizes=(10, 20, 30))
    first = 2 * (100 * 10 + 10 * 20 + 20 + 100 * 20)
    assert launch_bytes(graph, ["l0"]) == first == graph["l0"].bytes
    assert traffic(graph, [(op.name,) for op in graph]) == graph.bytes


def test_a_pipeline_moves_inputs_outputs_and_parameters():
    graph = mlp(rows=100, sizes=(10, 20, 30))
    weights = 2 * (10 * 20 + 20 + 20 * 30 + 30)
    assert traffic(graph, select(graph).units(graph)) == 2 * 100 * (10 + 30) + weights


def test_nerf_saves_what_the_paper_says():
    """Table 2: 98.58 % by Kitsune, 40.19 % by vertical fusion, at about ten thousand points."""
    graph = nerf(9728)
    assert 100 * reduction(graph, select(graph).units(graph)) == pytest.approx(98.58, abs=0.02)
    assert 100 * reduction(graph, select_vertical(graph).units(graph)) == pytest.approx(40.19, abs=0.5)


def test_what_the_backward_graph_reads_is_written_whatever_is_fused():
    graph = trained_mlp(rows=256, sizes=(64, 128, 128))
    saved = sum(v.bytes for v in graph.values.values() if v.saved)
    assert saved == 2 * 256 * 256
    forward = select(graph).nodes[0]
    inputs = 2 * 256 * 64 + sum(v.bytes for n, v in graph.values.items() if v.is_parameter)
    assert launch_bytes(graph, forward.ops) == inputs + saved


def test_a_value_that_two_operators_of_a_launch_read_is_read_once():
    b = Builder()
    x = b.input("x", 64, 8)
    b.binary("total", b.act("a", x), b.act("c", x))
    graph = b.graph()
    assert launch_bytes(graph, ["a", "c", "total"]) == 2 * 2 * 64 * 8


def test_a_result_read_outside_is_written():
    b = Builder()
    h = b.act("a", b.linear("l", b.input("x", 64, 8), 8))
    b.gather("take", h, 64)
    graph = b.graph()
    assert launch_bytes(graph, ["l", "a"]) == 2 * (64 * 8 + 64 + 8 + 64 * 8)


@settings(max_examples=100, deadline=None)
@given(random_graphs())
def test_fusing_never_moves_more_and_never_less_than_the_graph_needs(graph):
    bulk = traffic(graph, [(op.name,) for op in graph])
    ends = sum(v.bytes for v in graph.values.values() if v.is_output)
    read = {x.value for op in graph for x in op.inputs}
    begins = sum(v.bytes for n, v in graph.values.items() if n in read and (v.is_input or v.is_parameter))
    for found in (select(graph), select_vertical(graph)):
        fused = traffic(graph, found.units(graph))
        assert begins + ends <= fused <= bulk
    whole = traffic(graph, [tuple(op.name for op in graph)])
    assert whole == begins + ends
