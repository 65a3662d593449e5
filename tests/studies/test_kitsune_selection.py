"""Selection: what is excluded and why, which patterns match, and that every subgraph can run as one launch."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from operator_graphs import Builder, gated_ffn, mlp, nerf, trained_mlp
from torch import fx

from tilestream.errors import PlanError
from tilestream.studies.kitsune.compiler.operators import Kind, OperatorGraph
from tilestream.studies.kitsune.compiler.patterns import DEEP, VERTICAL, letter
from tilestream.studies.kitsune.compiler.selection import COMPLETE, INDEXES, LARGE, Selection, schedule, select


def select_vertical(graph: OperatorGraph) -> Selection:
    return select(graph, VERTICAL)


def letters(graph: OperatorGraph) -> str:
    return "".join(letter(op, graph) for op in graph)


def test_nerf_is_one_pipeline_and_nine_vertical_pairs():
    graph = nerf()
    assert letters(graph) == "LALALALALACLALALALLCLALC"
    spatial, vertical = select(graph), select_vertical(graph)
    assert [n.ops for n in spatial.nodes] == [tuple(op.name for op in graph)]
    assert spatial.fused == 24 and not spatial.exclusions
    assert vertical.fused == 18 and len(vertical.nodes) == 9
    assert {e.op for e in vertical.exclusions} == {"skip", "alpha", "feature", "join", "rgb", "out"}


def test_backward_of_an_activation_needs_all_three_readers():
    """The first layer has no dX: an elementwise operator that feeds one product is no multicast (Fig. 2c)."""
    graph = trained_mlp(sizes=(64, 256, 128, 32))
    assert letters(graph) == "LALALA" + "exwb" * 2 + "ewb"
    spatial = select(graph)
    assert [n.pattern for n in spatial.nodes] == ["mlp", "mlp backward", "mlp backward"]
    deep = select(graph, DEEP)
    assert deep.fused == spatial.fused and [len(n.ops) for n in deep.nodes] == [6, 8]
    assert {e.op for e in spatial.exclusions} == {"b0_da", "b0_dw", "b0_db"}
    assert select_vertical(graph).fused == 6  # forward only


def test_readers_of_the_derivative_in_any_order():
    again = trained_mlp(order="bwx")
    assert letters(again)[6:10] == "ebwx"
    assert select(again).fused == select(trained_mlp()).fused


def test_gathers_are_excluded_and_split_what_they_separate():
    b = Builder()
    h = b.act("a0", b.linear("l0", b.input("x", 256, 64), 128))
    h = b.gather("take", h, 512)
    b.linear("l2", b.act("a1", b.linear("l1", h, 128)), 64)
    found = select(b.graph())
    assert [n.ops for n in found.nodes] == [("l0", "a0"), ("l1", "a1", "l2")]
    assert [(e.op, e.reason) for e in found.exclusions] == [("take", INDEXES)]


def test_concatenation_of_complete_values_stays_out():
    b = Builder()
    h = b.cat("join", b.input("state", 256, 64), b.scan("sums", b.input("messages", 256, 64)))
    b.linear("l1", b.act("a0", b.linear("l0", h, 128)), 64)
    found = select(b.graph())
    assert [n.ops for n in found.nodes] == [("l0", "a0", "l1")]
    assert ("join", COMPLETE) in [(e.op, e.reason) for e in found.exclusions]
    by_the_papers_rules = select(b.graph(), complete=True)
    assert [n.ops for n in by_the_papers_rules.nodes] == [("join", "l0", "a0", "l1")]


def test_vertical_reads_a_concatenation_only_of_what_is_in_memory_anyway():
    def model(shared: bool) -> OperatorGraph:
        b = Builder()
        h = b.act("a0", b.linear("l0", b.input("x", 256, 64), 128))
        other = b.scan("rows", h if shared else b.input("table", 256, 64))
        b.act("a1", b.linear("l1", b.cat("join", h, other), 128))
        return b.graph()

    assert [n.pattern for n in select_vertical(model(True)).nodes][-1] == "concatenation, linear, activation"
    assert "join" in {e.op for e in select_vertical(model(False)).exclusions}
    assert select(model(False)).fused == 5  # a pipeline streams it


def test_only_narrow_layers_are_joined_vertically():
    narrow, wide = mlp(sizes=(384, 128, 128, 128), norm=True), mlp(sizes=(384, 256, 256, 256), norm=True)
    assert [n.pattern for n in select_vertical(narrow).nodes] == ["narrow mlp"]
    assert select_vertical(wide).fused == 4
    assert select(narrow).fused == select(wide).fused == 6


def test_linears_alone_are_left_to_bulk():
    b = Builder()
    x = b.input("x", 256, 64)
    for name in "qkv":
        b.linear(name, x, 64, bias=False)
    found = select(b.graph())
    assert not found.nodes and {e.reason for e in found.exclusions} == {LARGE}


def test_gated_ffn_and_rms_norm_are_patterns():
    graph = gated_ffn()
    assert letters(graph) == "ADAMA" + "lAlMl" + "R"
    assert [n.pattern for n in select(graph).nodes] == ["rms norm", "gated ffn"]
    assert [n.pattern for n in select_vertical(graph).nodes] == ["rms norm"]


def test_a_group_that_a_path_leaves_and_comes_back_to_is_no_launch():
    """The sum needs what a gather outside makes of the group's own result."""
    b = Builder()
    x = b.input("x", 256, 64)
    h = b.act("a0", b.linear("l0", x, 64))
    g = b.gather("take", h, 256)
    y = b.linear("l1", h, 64)
    z = b.binary("meet", y, g)
    graph = b.graph()
    assert z.name in graph.operators[-1].outputs
    schedule(graph, [["l0", "a0", "l1"]])
    with pytest.raises(PlanError, match="waits for itself"):
        schedule(graph, [["l0", "a0", "l1", "meet"]])


def test_two_towers_are_two_pipelines():
    b = Builder()
    for side in "ab":
        b.linear(f"{side}1", b.act(f"{side}r", b.linear(f"{side}0", b.input(f"x{side}", 256, 64), 64)), 64)
    assert [n.ops for n in select(b.graph()).nodes] == [("a0", "ar", "a1"), ("b0", "br", "b1")]


@st.composite
def random_graphs(draw) -> OperatorGraph:
    b = Builder()
    values = [b.input("x", 128, 32), b.input("y", 128, 32)]
    for i in range(draw(st.integers(1, 24))):
        a = draw(st.sampled_from(values[-4:]))
        kind = draw(st.sampled_from(["linear", "linear", "act", "act", "add", "cat", "norm", "gather"]))
        if kind == "linear":
            values.append(b.linear(f"n{i}", a, 32, bias=draw(st.booleans())))
        elif kind == "add":
            values.append(b.binary(f"n{i}", a, draw(st.sampled_from([v for v in values if _like(v, a)]))))
        elif kind == "cat":
            values.append(b.cat(f"n{i}", a, draw(st.sampled_from(values))))
        elif kind == "gather":
            values.append(b.gather(f"n{i}", a, 128))
        else:
            values.append(getattr(b, kind)(f"n{i}", a))
    return b.graph()


def _like(v: fx.Node, a: fx.Node) -> bool:
    return v.meta["val"].shape == a.meta["val"].shape


@settings(max_examples=150, deadline=None)
@given(random_graphs())
def test_every_subgraph_is_a_launch_and_every_other_operator_has_a_reason(graph):
    for found in (select(graph), select_vertical(graph)):
        units = found.units(graph)  # raises where two subgraphs wait for each other
        assert sorted(n for ops in units for n in ops) == sorted(op.name for op in graph)
        made = set()
        for ops in units:
            for name in ops:
                assert {p.name for p in graph.predecessors(graph[name])} <= made | set(ops)
            made |= set(ops)
        for node in found.nodes:
            assert len(node.ops) > 1 and not any(graph[n].kind is Kind.GATHER for n in node.ops)
            assert _joined(graph, node.ops)
        outside = {op.name for op in graph} - {n for node in found.nodes for n in node.ops}
        assert {e.op for e in found.exclusions} == outside and all(e.reason for e in found.exclusions)


def _joined(graph: OperatorGraph, ops: tuple[str, ...]) -> bool:
    """Whether one value after the other leads from the first operator to all."""
    touched = {n: {x.value for x in graph[n].inputs} | set(graph[n].outputs) for n in ops}
    reached, left = touched[ops[0]], set(ops[1:])
    while new := {n for n in left if touched[n] & reached}:
        reached = reached.union(*(touched[n] for n in new))
        left -= new
    return not left
