"""Ragged axes: what is legal, what is derived, text and JSON; ``test_ragged_values.py`` has their values."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from tilestream.errors import IRError, VerifyError
from tilestream.ir.axes import Axis, Level, Loop, Spread
from tilestream.ir.derive import Nest, Partial, Shard, exchanges, held, loops_of, placement
from tilestream.ir.pipeline import Pipeline, Queue, Stage
from tilestream.ir.read import axes, program, tensors
from tilestream.ir.serialise import pipeline_from_json, pipeline_to_json
from tilestream.ir.text import show
from tilestream.ir.verify import verify

NAMES = axes("nodes edges=starts[nodes] x.rows starts.rows h=2 c=4")
TENSORS = "X[x.rows,h,c] S[edges,h]:f32 src[edges]:i32 starts[starts.rows]:i32 >Y[nodes,h,c]"
SOFTMAX = """
    s[edges,h]:f32 = copy S[edges,h]
    m[nodes,h]:f32 = product s combine=max
    d[edges,h]:f32 = sub s m
    e[edges,h]:f32 = exp d
    z[nodes,h]:f32 = product e
    x[edges,h,c] = copy X[src[edges],h,c]
    t[nodes,h,c]:f32 = product e x
    y[nodes,h,c] = div t z
    y -> Y[nodes,h,c]
"""
LOOPS = (Loop("nodes", 8), Loop("edges", 8))
GRID = Spread(Level.GRID, 4, ("nodes",))


def ragged(text: str = SOFTMAX, given: str = TENSORS, loops=LOOPS, mesh=(GRID,), names=NAMES) -> Pipeline:
    stage = Stage("s", program(text, names), tuple(loops), tuple(mesh))
    return Pipeline("ragged", tensors(given, names), (stage,))


def drawn(body) -> list:
    return [
        {item.axis: drawn(item.body)} if isinstance(item, Nest) else item.out.name if item.out else item.kind
        for item in body
    ]


def test_passes_over_the_edges_of_a_node_are_derived() -> None:
    p = ragged()
    verify(p)
    (stage,) = p.stages
    assert drawn(loops_of(stage)) == [
        {"nodes": [{"edges": ["s", "m"]}, {"edges": ["d", "e", "z", "x", "t"]}, "y", "store"]}
    ]
    assert held(stage, "s") == ("edges", "h") and held(stage, "d") == ("h",)


def test_edges_go_with_their_nodes_and_a_split_of_them_is_partial() -> None:
    (stage,) = ragged().stages
    made = {op.out.name: op for op in stage.ops if op.out is not None}
    assert placement(made["e"], GRID, stage) == placement(made["z"], GRID, stage) == Shard("nodes")
    assert exchanges(stage) == []
    split = Spread(Level.CLUSTER, 2, ("edges",))
    (stage,) = ragged(mesh=(GRID, split)).stages
    assert placement(made["z"], split, stage) == Partial("sum") and placement(made["m"], split, stage) == Partial("max")
    assert {(e.tile, e.how) for e in exchanges(stage)} == {
        ("m", "all-reduce"),
        ("z", "all-reduce"),
        ("t", "all-reduce"),
    }


def test_a_store_of_edges_lies_in_the_loop_over_their_nodes() -> None:
    p = ragged(
        "s[edges,h]:f32 = copy S[edges,h]\n s -> Y[order[edges],h]",
        "S[edges,h]:f32 order[edges]:i32 starts[starts.rows]:i32 >Y[x.rows,h]",
    )
    verify(p)
    assert drawn(loops_of(p.stages[0])) == [{"nodes": [{"edges": ["s", "store"]}]}]
    assert exchanges(p.stages[0]) == []


def test_text_and_json_say_all() -> None:
    text = "one[edges]:f32 = fill value=1.0\n n[nodes] = product one\n n -> Y[nodes]"
    p = ragged(text, "starts[starts.rows]:i32 >Y[nodes]")
    verify(p)
    assert "  axis edges=starts[nodes]\n" in show(p) and "one[edges]:f32 = fill value=1.0\n" in show(p)
    assert pipeline_from_json(json.loads(json.dumps(pipeline_to_json(p)))) == p
    assert '"edges", null, "nodes", "starts"' in json.dumps(pipeline_to_json(p))
    assert '["nodes", null]' in json.dumps(pipeline_to_json(p))  # as ever where nothing is ragged
    with pytest.raises(IRError, match="cannot read axis edges=starts"):
        axes("edges=starts")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"names": {"edges": Axis("edges", of="bags", bounds="starts")}}, "nothing has axis 'bags'"),
        ({"names": {"edges": Axis("edges", of="nodes", bounds="ends")}}, "'ends', which is no tensor"),
        ({"names": {"nodes": Axis("nodes", of="edges", bounds="starts")}}, "it lies within itself"),
        ({"given": TENSORS.replace("rows]:i32", "rows]:f32")}, "dtype f32"),
        ({"loops": LOOPS[::-1]}, "loops over 'edges' outside of 'nodes'"),
        ({"text": SOFTMAX.replace("exp d", "exp d[edges+1,h]")}, "may be of another 'nodes'"),
        ({"text": SOFTMAX.replace("sub s m", "sub s m[src[edges],h]")}, "are yet to be made"),
        ({"text": SOFTMAX.replace("combine=max", "combine=most")}, "combines by 'most'"),
        ({"text": SOFTMAX.replace("z[nodes,h]", "z[h]").replace("div t z", "div t z[h]")}, "of all 'nodes' at once"),
        ({"text": SOFTMAX.replace("combine=max", "combine=softmax")}, "not a product of 1"),
        ({"text": SOFTMAX.replace("product e x", "product z x combine=softmax")}, "the score 'z' lacks edges"),
    ],
)
def test_what_is_not_legal_says_why(changes, message) -> None:
    if "names" in changes:
        changes["names"] = {**NAMES, **changes["names"]}
    with pytest.raises(VerifyError, match=message):
        verify(ragged(**changes))


def test_one_axis_has_one_way_to_its_bounds() -> None:
    p = ragged()
    other = axes("nodes edges=ends[nodes] x.rows starts.rows h=2 c=4")
    with pytest.raises(
        VerifyError, match=r"'edges' is starts\[nodes\] here and ends\[nodes\] there|the second another"
    ):
        verify(replace(p, stages=(replace(p.stages[0], ops=program(SOFTMAX, other)),)))


def test_edges_go_through_queues_in_dram_alone() -> None:
    text = SOFTMAX.strip().splitlines()
    first = Stage("first", program("\n".join(text[:4]), NAMES), LOOPS, (GRID,))
    later = Stage("later", program("\n".join(text[4:]), NAMES, e="edges,h"), LOOPS, (GRID,))
    p = Pipeline("two", tensors(TENSORS, NAMES), (first, later), (Queue("e", "first", ("later",), depth=64),))
    with pytest.raises(VerifyError, match="how many positions of 'edges'"):
        verify(p)
