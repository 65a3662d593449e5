"""DOT: what is written is read back, SAM's dialect runs, and what cannot be read is named."""

from __future__ import annotations

import re

import numpy as np
import pytest
from sam_graphs import run_dot, sam

from tilestream.errors import SparseError
from tilestream.sparse.dot import from_dot, to_dot
from tilestream.sparse.dot.names import index_names
from tilestream.sparse.dot.text import parse, quote
from tilestream.sparse.kernels import (
    DCSC,
    DCSR,
    Kernel,
    chain,
    elementwise,
    hashed,
    matmul,
    matmul_dense,
    matmul_parallel,
    sddmm,
)
from tilestream.sparse.run_spec import run
from tilestream.sparse.storage import Format
from tilestream.sparse.stream.graph import Port

ORDERS = ("ijk", "ikj", "jik", "jki", "kij", "kji")
KERNELS = [
    elementwise("mul"),
    elementwise("add"),
    chain(),
    matmul_dense(),
    matmul_parallel(3, ordered=True),
    sddmm("locate"),
    sddmm("coiterate"),
    *map(matmul, ORDERS),
]


def formats(kernel: Kernel) -> dict[str, Format]:
    return {**kernel.formats, kernel.result: kernel.format}


def as_sam(kernel: Kernel) -> str:
    """The text without all that only we write."""
    text = to_dot(kernel.graph, formats(kernel))
    text = re.sub(r"^ *generator=.*\n", "", text, flags=re.MULTILINE)
    return re.sub(r' (node|kind|source|[ar]_\w+|(?:root|over)_\w+|out|in)="[^"]*"', "", text)


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda k: k.graph.name)
def test_what_is_written_is_read_back(kernel):
    text = to_dot(kernel.graph, formats(kernel))
    got = from_dot(text)
    assert set(got.graph.nodes) == set(kernel.graph.nodes)
    assert (got.graph.name, got.graph.block) == (kernel.graph.name, 1)
    assert got.formats == formats(kernel)
    assert to_dot(got.graph, got.formats) == text


@pytest.mark.parametrize(
    "kernel",
    [k for k in KERNELS if "x3" not in k.graph.name and "locate" not in k.graph.name and "dense" not in k.graph.name],
    ids=lambda k: k.graph.name,
)
def test_sam_dialect_means_the_same(kernel):
    """Without our own attributes, the file is read by SAM's conventions, and runs to the same values."""
    text = as_sam(kernel)
    assert "tilestream" not in text
    got = from_dot(text)
    arrays = {name: hashed(12, 3, i) for i, name in enumerate("BCDW")}
    ours = kernel.run(run, arrays, (12, 12))
    theirs = run_dot(got, arrays, (12, 12))
    assert np.array_equal(theirs.outputs["X"].to_dense(), ours.outputs["X"].to_dense())
    assert abs(theirs.cycles - ours.cycles) <= 4  # a reduction that is told its rows waits for one more node


HELD = sam(
    """
    10 fiberlookup index=i tensor=B mode=0 format=compressed src=true root=true
    11 broadcast
    12 repsiggen index=i
    13 repeat index=i tensor=C root=true
    14 fiberlookup index=k tensor=C mode=0 format=compressed root=false
    15 fiberlookup index=k tensor=B mode=1 format=compressed root=false
    16 intersect index=k
    17 fiberlookup index=j tensor=C mode=1 format=compressed root=false
    18 broadcast
    19 repsiggen index=j
    20 repeat index=j tensor=B root=false
    21 arrayvals tensor=B
    22 arrayvals tensor=C
    6 mul
    5 crdhold outer=i inner=k
    4 crdhold outer=i inner=j
    3 spaccumulator order=1 in0=j in1=i
    0 fiberwrite mode=vals tensor=X
    1 fiberwrite index=j tensor=X mode=1 format=compressed
    2 fiberwrite index=i tensor=X mode=0 format=compressed
    """,
    """
    10 11 crd
    11 5 crd_i
    11 12 crd
    12 13 repsig
    13 14 ref
    10 15 ref
    14 16 crd_in-C
    14 16 ref_in-C
    15 16 crd_in-B
    15 16 ref_in-B
    16 5 crd_k
    16 20 ref_out-B
    16 17 ref_out-C
    17 18 crd
    18 4 crd_j
    18 19 crd
    19 20 repsig
    20 21 ref
    17 22 ref
    21 6 val
    22 6 val
    5 4 crd_outer-i
    4 3 crd_outer-i
    4 3 crd_inner-j
    5 3 crd_inner-k
    6 3 val
    3 0 val
    3 1 crd_out-j
    3 2 crd_out-i
    """,
    "X=ss01,B=ss01,C=ss01",
)
"""A matmul as SAM's compiler wires it: the accumulator is given coordinates held for each inner one."""

RESIDUAL = sam(
    """
    9 fiberlookup index=i tensor=b mode=0 format=dense root=true
    10 fiberlookup index=i tensor=C mode=0 format=compressed root=true
    8 union index=i
    11 repsiggen index=i
    12 repeat index=i tensor=d root=true
    13 fiberlookup index=j tensor=d mode=0 format=dense root=false
    14 fiberlookup index=j tensor=C mode=1 format=compressed root=false
    15 intersect index=j
    7 arrayvals tensor=C
    16 arrayvals tensor=d
    6 mul
    5 reduce
    4 arrayvals tensor=b
    3 add sub=1
    0 fiberwrite mode=vals tensor=x
    1 fiberwrite index=i tensor=x mode=0 format=dense
    """,
    """
    9 8 crd_in-b
    9 8 ref_in-b
    10 8 crd_in-C
    10 8 ref_in-C
    8 1 crd
    8 11 crd
    11 12 repsig
    12 13 ref
    8 14 ref_out-C
    13 15 crd_in-d
    13 15 ref_in-d
    14 15 crd_in-C
    14 15 ref_in-C
    15 7 ref_out-C
    15 16 ref_out-d
    7 6 val
    16 6 val
    6 5 val
    5 3 val
    8 4 ref_out-b
    4 3 val
    3 0 val
    """,
    "x=d0,b=d0,C=ss01,d=d0",
)
"""x = b - C d, with rows that C does not have."""


OUTER = sam(
    """
    17 fiberlookup index=k tensor=B mode=1 format=compressed root=true
    18 fiberlookup index=k tensor=C mode=0 format=compressed root=true
    16 intersect index=k
    15 fiberlookup index=i tensor=B mode=0 format=compressed root=false
    14 broadcast
    13 repsiggen index=i
    12 repeat index=i tensor=C root=false
    11 fiberlookup index=j tensor=C mode=1 format=compressed root=false
    10 broadcast
    9 repsiggen index=j
    8 repeat index=j tensor=B root=false
    7 arrayvals tensor=C
    6 arrayvals tensor=B
    5 mul
    4 crdhold outer=i inner=j
    3 spaccumulator order=2 in0=j in1=i
    0 fiberwrite mode=vals tensor=X
    1 fiberwrite index=j tensor=X mode=1 format=compressed
    2 fiberwrite index=i tensor=X mode=0 format=compressed
    """,
    """
    17 16 crd_in-B
    17 16 ref_in-B
    18 16 crd_in-C
    18 16 ref_in-C
    16 3 crd_k
    16 15 ref_out-B
    16 12 ref_out-C
    15 14 crd
    14 4 crd_i
    14 13 crd
    13 12 repsig
    12 11 ref
    11 10 crd
    10 4 crd_j
    10 9 crd
    9 8 repsig
    15 8 ref
    8 6 ref
    11 7 ref
    6 5 val
    7 5 val
    4 3 crd_outer-i
    4 3 crd_inner-j
    5 3 val
    3 0 val
    3 1 crd_out-j
    3 2 crd_out-i
    """,
    "X=ss01,B=ss10,C=ss01",
)
"""An accumulator of order 2, of which the outer coordinate is held."""

SCALED = sam(
    """
    8 fiberlookup index=i tensor=c mode=0 format=compressed root=true
    6 repsiggen index=i
    5 repeat index=i tensor=b root=true
    3 arrayvals tensor=b
    4 arrayvals tensor=c
    2 fp_mul
    9 fp_mul rb_const=0.5
    1 fiberwrite index=i tensor=x mode=0 format=compressed
    0 fiberwrite mode=vals tensor=x
    """,
    """
    8 1 crd
    8 6 crd
    6 5 repsig
    5 3 ref
    8 4 ref
    3 2 val
    4 2 val
    2 9 val
    9 0 val
    """,
    "x=s0,b=none,c=s0",
)
"""x = b c / 2 with a scalar b."""


def test_a_scalar_operand():
    arrays = {"b": np.array(3.0), "c": np.array([0.0, 2.0, 0.0, 5.0])}
    result = run_dot(from_dot(SCALED), arrays, (4,))
    assert np.array_equal(result.outputs["x"].to_dense(), [0, 3, 0, 7.5])


@pytest.mark.parametrize("text", [HELD, OUTER], ids=["order 1", "order 2"])
def test_held_coordinates(text):
    got = from_dot(text, "held")
    m = {"B": hashed(20, 5, 1), "C": hashed(20, 5, 2)}
    result = run_dot(got, m, (20, 20))
    assert np.array_equal(result.outputs["X"].to_dense(), m["B"] @ m["C"])
    assert got.graph.name == "held"


def test_a_subtraction_has_its_operands_in_the_order_of_the_expression():
    matrix = hashed(12, 6, 1)
    assert not matrix.any(axis=1).all()
    arrays = {"b": np.arange(12.0), "C": matrix, "d": np.arange(1.0, 13.0)}
    result = run_dot(from_dot(RESIDUAL), arrays, (12,))
    assert np.array_equal(result.outputs["x"].to_dense(), arrays["b"] - matrix @ arrays["d"])


@pytest.mark.parametrize("numbers", [(4, 5), (5, 4), (2, 4)])
@pytest.mark.parametrize("first", [0, 1])
def test_subtraction_whatever_the_numbers_and_the_order_of_edges(numbers, first):
    """SAM's versions number the reduction before or after the other operand, and write edges either way."""
    left, right = numbers
    swap = {"4": f"n{left}", "5": f"n{right}"}
    text = re.sub(r"^( *)(4|5) \[", lambda m: f"{m[1]}{swap[m[2]]} [", RESIDUAL, flags=re.MULTILINE)
    text = re.sub(r"\b(4|5) ->", lambda m: f"{swap[m[1]]} ->", text)
    text = re.sub(r"-> (4|5)\b", lambda m: f"-> {swap[m[1]]}", text)
    lines = text.splitlines()
    into = [n for n, line in enumerate(lines) if "-> 3 " in line]
    if first:
        lines[into[0]], lines[into[1]] = lines[into[1]], lines[into[0]]
    matrix = hashed(12, 6, 1)
    arrays = {"b": np.arange(12.0), "C": matrix, "d": np.arange(1.0, 13.0)}
    result = run_dot(from_dot("\n".join(lines)), arrays, (12,))
    assert np.array_equal(result.outputs["x"].to_dense(), arrays["b"] - matrix @ arrays["d"])


def scaled(constant: str) -> str:
    return sam(
        f"""
        1 fiberlookup index=i tensor=b mode=0 format=dense root=true
        2 arrayvals tensor=b
        3 mul {constant}
        4 fiberwrite mode=vals tensor=x
        5 fiberwrite index=i tensor=x mode=0 format=dense
        """,
        """
        1 5 crd
        1 2 ref
        2 3 val
        3 4 val
        """,
        "x=d0,b=d0",
    )


@pytest.mark.parametrize("name", ["rb_const", "const0", "in2"])
def test_constants_are_kept(name):
    result = run_dot(from_dot(scaled(f"{name}=0.2")), {"b": np.arange(5.0)}, (5,))
    assert np.allclose(result.outputs["x"].to_dense(), 0.2 * np.arange(5.0))


def test_index_names():
    names = index_names(matmul("ikj").graph)
    assert [names[Port(n, "crd")] for n in ("B_i", "B_k", "C_k", "meet_k", "C_j")] == ["i", "j", "j", "j", "k"]
    assert names[Port("spacc", "crd0")] == "k"


def test_drawn_attributes():
    dot = parse(to_dot(matmul("kij").graph, {"B": DCSC, "C": DCSR, "X": DCSR}))
    assert dot.attrs["comment"] == "X=ss01,B=ss10,C=ss01", "the result first"
    nodes = {attrs["node"]: attrs for attrs in dot.nodes.values()}
    assert nodes["B_k"] | {"type": "fiberlookup", "mode": "1", "root": "true", "tensor": "B"} == nodes["B_k"]
    assert nodes["spacc"]["order"] == "2"
    assert "root_B" not in nodes


def test_quotes_and_comments():
    said = quote(chr(34) + "x" + chr(92))
    looks = "// a\n rankdir=LR; node [shape=box];"
    dot = parse(f"digraph {{ {looks} a [label={said}] /* b */ b; a -> b [c=1, d=2;] }}")
    assert dot.nodes == {"a": {"label": '"x\\'}, "b": {}}
    assert dot.edges == [("a", "b", {"c": "1", "d": "2"})]
    assert dot.attrs == {"rankdir": "LR"}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("graph { }", "digraph"),
        ("digraph {\n a [label }", "line 2"),
        ("digraph { a -> b }", "'a'"),
        ("digraph { a [x=1]", "its end"),
        ("digraph { $ }", "\\$"),
        ('digraph { a [type="glb"] }', "'glb'"),
        ('digraph { generator="tilestream" a [kind="teleport"] }', "'teleport'"),
        ('digraph { a [type="mul"] b [type="mul"] a -> b [type="val"] b -> a [type="val"] }', "cycle"),
        ('digraph { a [type="spaccumulator" order="1" in0="j"] }', "order 1"),
        ('digraph { a [type="crddrop" outer="i" inner="j" vals="true"] }', "no crd stream feeds node 'a'"),
        ('digraph { a [type="locator" lvl="0" dim_size="30"] }', "of type 'locator'"),
        ('digraph { a [type="mul" speed="9"] }', "speed='9', which is not understood"),
    ],
)
def test_what_cannot_be_read_is_named(text, says):
    with pytest.raises(SparseError, match=says):
        from_dot(text)
