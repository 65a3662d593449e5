"""The drawing of pipelines of any axes: what a stage's box says, and what an SVG of several stages holds."""

from __future__ import annotations

from xml.etree import ElementTree

from tilestream.ir.axes import Level, Loop, Spread
from tilestream.ir.pipeline import Pipeline, Queue, Stage, Transport
from tilestream.ir.read import axes, program, tensors
from tilestream.report import drawing, nest_drawing

NAMES = axes("rows k=32 hid=48 out=24")
TENSORS = tensors("X[rows,k] W1[hid,k] W2[out,hid] >Y[rows,out]", NAMES)
UP = "x[rows,k] = load X[rows,k]\na[rows,hid] = product x W1[hid,k]\n"
DOWN = "h[rows,hid] = relu a\ny[rows,out] = product h W2[out,hid]\ny -> Y[rows,out]\n"


def test_a_box_says_loops_exchanges_and_what_is_whole() -> None:
    mesh = (Spread(Level.GRID, 2, ("rows",)), Spread(Level.CLUSTER, 4, ("out", "hid")))
    stage = Stage("s", program(UP + DOWN, NAMES), (Loop("rows", 16), Loop("hid", 8)), mesh)
    assert [(r.indent, r.text) for r in nest_drawing.rows(stage)] == [
        (0, "2 CTAs of the grid divide rows"),
        (0, "4 CTAs of a cluster divide out, then hid"),
        (0, "for rows, 16 a turn"),
        (1, "x[rows,k]:bf16 = load X[rows,k]   (k whole)"),
        (1, "for hid, 8 a turn"),
        (2, "a[rows,hid]:bf16 = product x[rows,k] W1[hid,k]"),
        (2, "h[rows,hid]:bf16 = relu a[rows,hid]"),
        (2, "all-gather of h through DSM"),
        (2, "y[rows,out]:bf16 = product h[rows,hid] W2[out,hid]   (out whole)"),
        (1, "y[rows,out] -> Y[rows,out]"),
    ]


def test_a_loop_over_edges_says_whose() -> None:
    names = axes("nodes edges=starts[nodes] f=4")
    ops = program("m[edges,f] = copy e[edges,f]\ns[nodes,f] = product m\ns -> Y[nodes,f]", names)
    stage = Stage("s", ops, (Loop("nodes", 8), Loop("edges", 4)))
    texts = [(r.indent, r.text) for r in nest_drawing.rows(stage) if r.kind == "loop"]
    assert texts == [(0, "for nodes, 8 a turn"), (1, "for edges of each nodes, 4 a turn")]


def test_stages_and_queues_are_drawn() -> None:
    for transport, kind in ((Transport.L2, "queue l2"), (Transport.DRAM, "queue dram")):
        queue = Queue("a", "up", ("down",), transport, depth=0 if transport is Transport.DRAM else 4)
        ops = program(UP + DOWN, NAMES)
        up = Stage("up", ops[:2], (Loop("rows", 16),), (Spread(Level.GRID, 3, ("rows",)),))
        down = Stage("down", ops[2:], (Loop("rows", 16),), (Spread(Level.GRID, 2, ("rows",)),))
        text = drawing.svg(Pipeline("two", TENSORS, (up, down), (queue,)))
        found = ElementTree.fromstring(text)
        assert [g.get("class") for g in found if g.tag == "g"] == ["stage", "stage"]
        assert [p.get("class") for p in found if p.tag == "path"] == [kind, "tip"]
        assert ("4 tiles in L2" in text) == (transport is Transport.L2)
