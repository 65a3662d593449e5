"""The worked streams of the stream semantics (FuseFlow section 3), and what the released code gets wrong."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
from places import DOCS

from tilestream.errors import SparseError
from tilestream.sparse.run_spec import run_node
from tilestream.sparse.spec.text import read, write
from tilestream.sparse.storage import Format, Level, SparseTensor, pack
from tilestream.sparse.stream.graph import NODES, Node, Port

VALUES = {("array", "val"), ("alu", "a"), ("alu", "b"), ("alu", "val"), ("reduce", "val"), ("spacc", "val")}
VALUES |= {("val_drop", "val")}


def through(kind: str, tensor: SparseTensor | None = None, attrs: dict | None = None, /, **streams: str):
    """The output lines, by port, of a node that is given these lines."""
    ins = {p.rstrip("_"): read(text, (kind, p.rstrip("_")) in VALUES) for p, text in streams.items()}
    node = Node(kind, kind, tuple((p, Port("given", p)) for p in ins), tuple((attrs or {}).items()))
    outs = run_node(node, ins, tensor)
    return {port: write(tokens, (kind, port) in VALUES) for port, tokens in outs.items()}


def vector(*fibers: list[int], size: int = 100) -> SparseTensor:
    """A compressed level with these fibers, and the values 0, 1, ..."""
    crd = np.array([x for f in fibers for x in f], dtype=np.int64)
    seg = np.cumsum([0, *map(len, fibers)])
    return SparseTensor("A", (size,), Format(("compressed",)), (Level(size, seg, crd),), np.arange(float(len(crd))))


def test_repeat():
    got = through("repeat", in_="0 1 S0 2 S0 3 S1 D", sig="R R R S R R R S R S R R S D")
    assert got["out"] == "0 0 0 S0 1 1 1 S1 2 S1 3 3 S2 D"
    assert through("repeat", in_="0 1 2 S0 D", sig="R R S R S R S D")["out"] == "0 0 S0 1 S0 2 S1 D"


def test_repeat_signals():
    got = through("repsig", in_="0 0 0 S0 1 N 1 S0 2 2 2 S1 D")["sig"]
    assert got == "0 0 0 S0 0 0 0 S0 0 0 0 S0 D"


def test_repeat_of_an_absent_operand_and_of_an_empty_fiber():
    assert through("repeat", in_="0 N S0 D", sig="R R S R S D")["out"] == "0 0 S0 N S1 D"
    assert through("repeat", in_="0 S0 S0 2 S1 D", sig="R S S R S D")["out"] == "0 S1 S1 2 S2 D"


def test_intersect():
    got = through(
        "intersect",
        crd0="0 1 2 3 S0 0 1 2 3 S0 0 1 2 3 S1 D",
        in0="0 1 2 3 S0 4 5 6 7 S0 8 9 10 11 S1 D",
        crd1="4 S0 0 1 S0 0 S1 D",
        in1="0 S0 1 2 S0 3 S1 D",
    )
    assert got == {"crd": "S0 0 1 S0 0 S1 D", "out0": "S0 4 5 S0 8 S1 D", "out1": "S0 1 2 S0 3 S1 D"}


def test_union():
    got = through(
        "union",
        crd0="0 1 S0 2 3 S0 S0 4 5 S1 D",
        in0="0 1 S0 2 3 S0 S0 4 5 S1 D",
        crd1="1 2 3 S0 S0 0 1 2 S0 S1 D",
        in1="0 1 2 S0 S0 2 3 4 S0 S1 D",
    )
    assert got["crd"] == "0 1 2 3 S0 2 3 S0 0 1 2 S0 4 5 S1 D"
    assert got["out0"] == "0 1 N N S0 2 3 S0 N N N S0 4 5 S1 D"
    assert got["out1"] == "N 0 1 2 S0 N N S0 2 3 4 S0 N N S1 D"


def test_union_of_three():
    got = through("union", crd0="0 2 S0 D", in0="5 6 S0 D", crd1="1 S0 D", in1="7 S0 D", crd2="2 S0 D", in2="8 S0 D")
    assert got == {"crd": "0 1 2 S0 D", "out0": "5 N 6 S0 D", "out1": "N 7 N S0 D", "out2": "N N 8 S0 D"}


def test_array():
    values = pack("A", np.array([1.0, 2, 3, 4, 5]), Format(("dense",)))
    got = through("array", values, {"tensor": "A"}, ref="N 0 1 2 S0 N N S0 2 3 4 S0 N N S1 D")
    assert got["val"] == "0 1 2 3 S0 0 0 S0 3 4 5 S0 0 0 S1 D"


def test_reduce():
    assert through("reduce", None, {"op": "add"}, val="5 5 S0 5 S0 4 8 S0 4 3 S0 4 3 S1 D")["val"] == "10 5 12 7 7 S0 D"


def test_reduce_max_over_negative_values():
    """The released code starts every fiber but the first from 0."""
    assert through("reduce", None, {"op": "max"}, val="-5 -7 S0 -3 -9 S1 D")["val"] == "-5 -3 S0 D"


def test_an_empty_fiber_reduces_to_the_neutral_element():
    assert through("reduce", None, {"op": "add"}, val="1 S0 S0 2 S1 D")["val"] == "1 0 2 S0 D"
    assert through("reduce", None, {"op": "max"}, val="1 S0 S0 2 S1 D")["val"] == f"1 {-math.inf:g} 2 S0 D"
    assert through("reduce", None, {"op": "max"}, val="N -1 S0 D")["val"] == "0 D"


def test_spacc_of_order_1():
    got = through(
        "spacc",
        None,
        {"order": 1},
        crd1="0 2 S0 2 S1 D",
        crd0="0 2 3 S0 0 2 3 S1 0 2 3 S2 D",
        val="50 5 10 S0 40 4 8 S1 -40 33 36 S2 D",
    )
    assert got == {"crd0": "0 2 3 S0 0 2 3 S1 D", "val": "90 9 18 S0 -40 33 36 S1 D"}


def test_spacc_of_order_2():
    """X_ij = sum_k A_ki B_kj: k = 0 gives (1, 0) and (1, 2); k = 3 gives (0, 2) and (1, 2)."""
    got = through(
        "spacc",
        None,
        {"order": 2},
        crd2="0 3 S0 D",
        crd1="1 S0 0 1 S1 D",
        crd0="0 2 S1 2 S0 2 S2 D",
        val="1 2 S1 4 S0 8 S2 D",
    )
    assert got == {"crd1": "0 1 S0 D", "crd0": "2 S0 0 2 S1 D", "val": "4 S0 1 10 S1 D"}


def test_spacc_of_empty_fibers():
    """The reduced fiber is empty; then it holds an element whose own fiber is; then one more."""
    got = through("spacc", None, {"order": 1}, crd1="S0 4 S0 1 S1 D", crd0="S1 S1 7 S2 D", val="S1 S1 3 S2 D")
    assert got == {"crd0": "S0 S0 7 S1 D", "val": "S0 S0 3 S1 D"}


def test_spacc_by_maximum():
    got = through(
        "spacc", None, {"order": 1, "op": "max"}, crd1="0 1 S0 D", crd0="2 S0 2 5 S1 D", val="-4 S0 -3 -8 S1 D"
    )
    assert got == {"crd0": "2 5 S0 D", "val": "-3 -8 S0 D"}


def test_spacc_of_order_0_tells_an_empty_row_from_an_empty_fiber():
    """The same values: a row that is empty, and a row with one element whose fiber is."""
    assert through("spacc", None, {"order": 0}, crd0="S0 3 S1 D", val="S1 2 S2 D")["val"] == "S0 2 S1 D"
    assert through("spacc", None, {"order": 0}, crd0="9 S0 3 S1 D", val="S1 2 S2 D")["val"] == "0 S0 2 S1 D"


@pytest.mark.parametrize(
    ("outer", "inner", "kept_outer", "kept_inner"),
    [
        ("0 1 2 3 S0 D", "1 S0 1 S0 S0 1 S1 D", "0 1 3 S0 D", "1 S0 1 S0 1 S1 D"),
        ("0 1 S0 D", "1 S0 S1 D", "0 S0 D", "1 S1 D"),
        ("1 S0 D", "1 2 3 S1 D", "1 S0 D", "1 2 3 S1 D"),
        ("0 1 S0 D", "1 S0 1 S1 D", "0 1 S0 D", "1 S0 1 S1 D"),
        ("0 1 S0 2 S1 D", "S0 S1 4 S2 D", "S0 2 S1 D", "S1 4 S2 D"),
        ("S0 2 S1 D", "S1 4 S2 D", "S0 2 S1 D", "S1 4 S2 D"),
    ],
)
def test_crd_drop(outer, inner, kept_outer, kept_inner):
    assert through("crd_drop", outer=outer, inner=inner) == {"outer": kept_outer, "inner": kept_inner}


@pytest.mark.parametrize(
    ("outer", "inner", "held"),
    [
        ("0 1 2 S0 D", "0 2 S0 2 S0 2 S1 D", "0 0 S0 1 S0 2 S1 D"),
        (
            "0 2 S0 3 S0 4 S1 D",
            "0 2 3 S0 0 2 3 S1 0 S1 2 3 S2 D",
            "0 0 0 S0 2 2 2 S1 3 S1 4 4 S2 D",
        ),
        ("0 1 2 5 S0 D", "1 2 5 S0 2 S0 2 S0 2 3 4 5 S1 D", "0 0 0 S0 1 S0 2 S0 5 5 5 5 S1 D"),
        ("S0 3 S1 D", "S1 1 S2 D", "S1 3 S2 D"),
    ],
)
def test_crd_hold(outer, inner, held):
    assert through("crd_hold", outer=outer, inner=inner)["outer"] == held


def test_fork():
    got = through("fork", None, {"ways": 2}, in_="0 1 2 S0 0 1 2 S1 D")
    assert got == {"out0": "0 2 S0 1 S1 D", "out1": "1 S0 0 2 S1 D"}


def test_join_of_fibers():
    assert through("join", in0="0 2 S0 0 2 4 S1 D", in1="1 3 S0 1 3 S1 D")["out"] == "0 2 S0 1 3 S0 0 2 4 S0 1 3 S1 D"


def test_join_of_a_number_of_fibers_that_the_ways_do_not_divide():
    """The released code ends the parent fiber wherever its last way does."""
    assert through("join", in0="5 S0 6 S0 7 S1 D", in1="8 S0 9 S1 D")["out"] == "5 S0 8 S0 6 S0 9 S0 7 S1 D"


def test_join_of_elements():
    assert through("join", None, {"level": 0}, in0="0 2 S0 1 S1 D", in1="1 S0 0 2 S1 D")["out"] == "0 1 2 S0 0 1 2 S1 D"


@pytest.mark.parametrize(
    ("order", "in0", "in1", "out"),
    [
        ("4 S0 D", "1 S1 D", "S1 D", "1 S1 D"),  # fewer rows than ways
        ("4 S0 D", "S1 D", "S1 D", "S1 D"),  # one row, and it is empty
        ("4 6 S0 D", "S1 D", "S1 D", "S0 S1 D"),  # two, both empty: the same streams
        ("S0 D", "S1 D", "S1 D", "S1 D"),  # none
        ("1 2 3 S0 4 S1 D", "5 S0 7 S1 S2 D", "6 S1 8 S2 D", "5 S0 6 S0 7 S1 8 S2 D"),  # goes on with the second way
    ],
)
def test_join_that_is_told_what_was_dealt(order, in0, in1, out):
    assert through("join", None, {"ordered": 1}, in0=in0, in1=in1, in2=order)["out"] == out


def test_join_of_deeper_units_that_is_told():
    got = through("join", None, {"ordered": 1, "level": 2}, in0="1 S0 2 S1 S2 D", in1="3 S2 D", in2="0 1 2 S0 D")
    assert got["out"] == "1 S0 2 S1 3 S1 S2 D"


def test_broadcast():
    assert through("broadcast", None, {"ways": 2}, in_="1 N S0 D") == {"out0": "1 N S0 D", "out1": "1 N S0 D"}


def test_scan_of_a_compressed_level():
    got = through("scan", vector([1, 4], [], [0]), {"tensor": "A", "level": 0}, ref="0 1 S0 2 S1 D")
    assert got == {"crd": "1 4 S0 S1 0 S2 D", "ref": "0 1 S0 S1 2 S2 D"}


def test_scan_of_a_dense_level():
    tensor = pack("A", np.ones((2, 3)), Format(("dense", "dense")))
    got = through("scan", tensor, {"tensor": "A", "level": 1}, ref="1 0 S0 D")
    assert got == {"crd": "0 1 2 S0 0 1 2 S1 D", "ref": "3 4 5 S0 0 1 2 S1 D"}


def test_scan_of_an_absent_operand_and_of_an_empty_row():
    """N is an empty fiber: nothing below a union carries N in its coordinates."""
    got = through("scan", vector([1, 4], [2]), {"tensor": "A", "level": 0}, ref="N 0 S0 S0 1 S1 D")
    assert got == {"crd": "S0 1 4 S1 S1 2 S2 D", "ref": "S0 0 1 S1 S1 2 S2 D"}


def test_nested_union_of_rows_that_one_operand_has():
    """The released code stops with an error here."""
    rows = through("union", crd0="0 2 S0 D", in0="0 1 S0 D", crd1="1 2 S0 D", in1="0 1 S0 D")
    assert rows == {"crd": "0 1 2 S0 D", "out0": "0 N 1 S0 D", "out1": "N 0 1 S0 D"}
    below = [
        through("scan", vector([5], [6, 7]), {"tensor": "A", "level": 0}, ref=rows["out0"]),
        through("scan", vector([1, 5], [7]), {"tensor": "A", "level": 0}, ref=rows["out1"]),
    ]
    got = through("union", crd0=below[0]["crd"], in0=below[0]["ref"], crd1=below[1]["crd"], in1=below[1]["ref"])
    assert got == {"crd": "5 S0 1 5 S0 6 7 S1 D", "out0": "0 S0 N N S0 1 2 S1 D", "out1": "N S0 0 1 S0 N 2 S1 D"}


def test_locate():
    tensor = pack("A", np.ones((2, 10)), Format(("dense", "dense")))
    got = through("locate", tensor, {"tensor": "A", "level": 1}, crd="3 7 S0 2 S1 D", ref="1 N S0 0 S1 D")
    assert got == {"crd": "3 7 S0 2 S1 D", "ref": "13 N S0 2 S1 D"}


@pytest.mark.parametrize(
    ("attrs", "out"),
    [
        ({"op": "add"}, "3 4 5 0 S0 D"),
        ({"op": "mul"}, "2 0 0 0 S0 D"),
        ({"op": "sub"}, "-1 4 -5 0 S0 D"),
        ({"op": "max"}, "2 4 5 0 S0 D"),
    ],
)
def test_alu_of_two(attrs, out):
    assert through("alu", None, attrs, a="1 4 N N S0 D", b="2 N 5 N S0 D")["val"] == out


def test_alu_of_one():
    assert through("alu", None, {"op": "relu", "unary": 1}, a="-1 2 N S0 D")["val"] == "0 2 0 S0 D"
    assert through("alu", None, {"op": "rsub", "unary": 1, "scalar": 10}, a="4 S0 D")["val"] == "6 S0 D"
    assert through("alu", None, {"op": "exp", "unary": 1}, a="N S0 D")["val"] == "1 S0 D"


@pytest.mark.parametrize(
    ("kind", "attrs", "streams"),
    [
        ("alu", {"op": "add"}, {"a": "1 S0 D", "b": "S0 D"}),
        ("intersect", {}, {"crd0": "1 S0 D", "in0": "1 S0 D", "crd1": "1 S1 D", "in1": "1 S1 D"}),
        ("intersect", {}, {"crd0": "1 S0 D", "in0": "1 S0 D", "crd1": "D", "in1": "D"}),
        ("union", {}, {"crd0": "1 S0 D", "in0": "S0 D", "crd1": "S0 D", "in1": "S0 D"}),
        ("repeat", {}, {"in_": "1 S0 D", "sig": "R D"}),
        ("spacc", {"order": 1}, {"crd1": "1 S1 D", "crd0": "1 S1 D", "val": "1 S1 D"}),
        ("spacc", {"order": 1}, {"crd0": "1 S1 D", "val": "1 S1 D"}),
        ("crd_drop", {}, {"outer": "1 S0 D", "inner": "2 S0 D"}),
        ("crd_hold", {}, {"outer": "1 2 S0 D", "inner": "1 S1 D"}),
        ("join", {}, {"in0": "1 S0 D", "in1": "2 S0 2 S0 D"}),
        ("write_crd", {"tensor": "X", "level": 0}, {"crd": "N S0 D"}),
    ],
)
def test_streams_that_do_not_fit_together_are_an_error_that_names_the_node(kind, attrs, streams):
    with pytest.raises(SparseError, match=kind):
        through(kind, None, attrs, **streams)


def test_a_word_that_is_no_token():
    with pytest.raises(SparseError, match="no token"):
        read("0 1 SX D")


PAGE = (DOCS / "sparse-streams.md").read_text()


@pytest.mark.parametrize("block", re.findall(r"```streams\n(.*?)```", PAGE, re.DOTALL))
def test_the_examples_of_the_documentation(block):
    head, *lines = block.strip().splitlines()
    kind, *pairs = head.split()
    attrs = {k: v if k == "op" else int(v) for k, v in (pair.split("=") for pair in pairs)}
    tensor = None
    if kind == "scan":
        attrs |= {"tensor": "A", "level": 0}
        tensor = vector([1, 4], [], [0])
    ins = dict(line.split(": ") for line in lines if ": " in line)
    outs = dict(line.split(" -> ") for line in lines if " -> " in line)
    if kind == "repsig":
        outs["sig"] = outs["sig"].replace("R", "0").replace("S", "S0")
    assert ins
    assert outs
    assert through(kind, tensor, attrs, **{f"{port}_": text for port, text in ins.items()}) == outs


def test_the_python_of_the_documentation_runs(capsys):
    scope: dict[str, object] = {}
    exec(
        compile("\n".join(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)), "docs/sparse-streams.md", "exec"), scope
    )
    assert "[6. 0.]" in capsys.readouterr().out


def test_the_documentation_names_every_kind_of_node():
    assert set(NODES) <= set(re.findall(r"[a-z_]+", PAGE.split("## Primitives")[1]))
