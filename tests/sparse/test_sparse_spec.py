"""Graphs run by the specification: reference cycle counts, values against numpy, channels with a bound, results."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilestream.errors import SparseError, StreamDeadlock
from tilestream.sparse.kernels import (
    DCSR,
    DENSE,
    Kernel,
    Wiring,
    chain,
    elementwise,
    hashed,
    matmul,
    matmul_dense,
    matmul_parallel,
    sddmm,
)
from tilestream.sparse.run_spec import run, run_node
from tilestream.sparse.spec import MEANING
from tilestream.sparse.storage import Format, pack
from tilestream.sparse.stream.assemble import assemble
from tilestream.sparse.stream.graph import NODES, Node, Port, with_broadcasts
from tilestream.sparse.timing import COMAL, Timing

ORDERS = ("ijk", "ikj", "jik", "jki", "kij", "kji")


def small(d: int) -> dict[str, np.ndarray]:
    return {"B": hashed(50, d, 1), "C": hashed(50, d, 2), "W": hashed(50, d, 3)}


def columns() -> np.ndarray:
    k, j = np.mgrid[0:50, 0:16]
    return ((7 * k + 3 * j) % 5) + 1.0


def test_the_reference_matrices():
    for d, nnz, product, chained in ((20, (117, 127, 130), 7366, 85641), (4, (578, 620, 657), 185949, 12375037)):
        m = small(d)
        assert tuple(int((x != 0).sum()) for x in m.values()) == nnz
        assert (m["B"] @ m["C"]).sum() == product
        assert (m["B"] @ m["C"] @ m["W"]).sum() == chained


@pytest.mark.parametrize(
    ("name", "d", "cycles", "written"),
    [
        ("elemmul", 20, 266, 6),
        ("ikj", 20, 2145, 282),
        ("ijk", 20, 12731, 2024),
        ("dense", 20, 2062, 736),
        ("chain", 20, 2238, 554),
        ("second", 20, 2047, 554),
        ("x2", 20, 1096, 282),
        ("elemadd", 4, 1120, 1062),
        ("elemmul", 4, 1120, None),
        ("ikj", 4, 7969, 2372),
        ("ijk", 4, 55135, 2500),
        ("dense", 4, 9903, 800),
        ("chain", 4, 33874, 2500),
        ("second", 4, 33708, 2500),
        ("x2", 4, 4276, 2372),
    ],
)
@pytest.mark.every(3)
def test_reference_cycles(name, d, cycles, written):
    """Comal's counts (FuseFlow section 6): the dense one within 0.5 %, as it repeats a reference more; else exact."""
    m = small(d)
    product = m["B"] @ m["C"]
    kernel, arrays, want = {
        "elemmul": (elementwise("mul"), m, m["B"] * m["C"]),
        "elemadd": (elementwise("add"), m, m["B"] + m["C"]),
        "dense": (matmul_dense(), {"B": m["B"], "C": columns()}, m["B"] @ columns()),
        "chain": (chain(), m, product @ m["W"]),
        "second": (matmul("ikj"), {"B": product, "C": m["W"]}, product @ m["W"]),
        "x2": (matmul_parallel(2), m, product),
    }.get(name) or (matmul(name), m, product)
    result = kernel.run(run, arrays, want.shape)
    assert np.array_equal(result.outputs["X"].to_dense(), want)
    assert abs(result.cycles - cycles) <= (0.005 * cycles if name == "dense" else 0)
    assert written is None or result.outputs["X"].nnz == written
    assert result.cycles == max(node.end_cycle for node in result.nodes)
    for node in result.nodes:
        assert node.busy + node.wait_input + node.wait_room + node.wait_memory == node.end_cycle, node.name
        assert node.wait_room == 0


@pytest.mark.parametrize(
    ("style", "width", "cycles"), [("coiterate", 1, 2367), ("coiterate", 10, 2367), ("locate", 10, 1347)]
)
def test_sddmm(style, width, cycles):
    """SAM's Python simulator has other latencies: 4 % on the short one."""
    b, ones = hashed(50, 20, 1), np.ones((50, width))
    result = sddmm(style).run(run, {"B": b, "C": ones, "D": ones.T}, b.shape)
    assert np.array_equal(result.outputs["X"].to_dense(), b * width)
    assert result.cycles == pytest.approx(cycles, rel=0.04)


def test_counts():
    """Of B_i . C_j over one common coordinate: the words that are read and written, and the operations."""
    kernel = matmul("ikj")
    b, c = np.zeros((2, 2)), np.zeros((2, 2))
    b[1, 0], c[0, 1] = 3.0, 5.0
    result = kernel.run(run, {"B": b, "C": c}, (2, 2))
    assert result.node("B_vals").bytes_read == result.node("C_vals").bytes_read == 4
    assert result.node("B_i").bytes_read == 4 * (2 + 1)
    assert result.node("X_vals_write").bytes_written == 4
    assert result.node("X_0_write").bytes_written == 4 * 2
    assert result.flops == 2
    assert result.bytes == sum(n.bytes_read + n.bytes_written for n in result.nodes)


matrices = st.integers(1, 6).flatmap(
    lambda n: st.tuples(
        *(
            st.lists(st.lists(st.sampled_from([0, 0, 1, 2, -3]), min_size=n, max_size=n), min_size=n, max_size=n).map(
                lambda rows: np.array(rows, dtype=np.float64)
            )
            for _ in range(3)
        )
    )
)


@settings(max_examples=60, deadline=None)
@given(matrices, st.sampled_from([*ORDERS, "add", "mul", "chain", "dense", "par1", "par2", "par3", "par5"]))
def test_values_on_random_matrices(arrays, name):
    """Empty rows, empty tensors, one element, dense; every order, and more ways than rows."""
    b, c, w = arrays
    kernel, want = _kernel(name, b, c, w)
    result = kernel.run(run, {"B": b, "C": c, "W": w}, b.shape)
    assert np.array_equal(result.outputs["X"].to_dense(), want)


def _kernel(name: str, b: np.ndarray, c: np.ndarray, w: np.ndarray) -> tuple[Kernel, np.ndarray]:
    if name in ORDERS:
        return matmul(name), b @ c
    if name in ("add", "mul"):
        return elementwise(name), b + c if name == "add" else b * c
    if name == "chain":
        return chain(), b @ c @ w
    return (matmul_dense() if name == "dense" else matmul_parallel(int(name[3:]), ordered=True)), b @ c


@settings(max_examples=30, deadline=None)
@given(matrices, st.sampled_from([*ORDERS, "add", "chain"]), st.integers(1, 6))
def test_channels_with_a_bound(arrays, name, depth):
    """Values are the same at every depth that is enough, cycles only fall with it, and a deep one costs nothing."""
    b, c, w = arrays
    kernel, want = _kernel(name, b, c, w)
    inputs = {"B": b, "C": c, "W": w}
    free = kernel.run(run, inputs, b.shape).cycles
    assert kernel.run(run, inputs, b.shape, depth=1000).cycles == free
    last = None
    for slots in (depth, depth + 1, 4 * depth + 40):
        try:
            result = kernel.run(run, inputs, b.shape, depth=slots)
        except StreamDeadlock:
            assert last is None, "a deeper channel deadlocks where a shallower one does not"
            continue
        assert np.array_equal(result.outputs["X"].to_dense(), want)
        assert result.cycles >= free
        assert last is None or result.cycles <= last
        last = result.cycles


def test_a_channel_of_one_slot_passes_a_token_every_two_cycles():
    """The slot is free again a cycle after the token is taken, and the token needs a cycle to arrive."""
    w = Wiring()
    i, ref = w.scan("A", "i", 0, w.root("A"))
    w.write("X", w.array("A", ref), i)
    graph = with_broadcasts("copy", tuple(w.nodes))
    tensor = {"A": pack("A", np.ones(100), Format(("dense",)))}
    shapes = {"X": ((100,), Format(("dense",)))}
    free = run(graph, tensor, shapes=shapes).cycles
    tight = run(graph, tensor, shapes=shapes, depth=1)
    assert abs(tight.cycles - 2 * free) < 10
    assert run(graph, tensor, shapes=shapes, depth=2).cycles == free
    assert tight.node("A_i").wait_room > 90


def centred() -> Kernel:
    """X_ij = B_ij - sum_j B_ij: the values have to wait for the sum of their row."""
    w = Wiring()
    i, row = w.scan("B", "i", 0, w.root("B"))
    j, ref = w.scan("B", "j", 1, row)
    val = w.array("B", ref)
    w.write("X", w.alu("sub", val, w.repeat("sum_j", w.reduce(val), ref)), i, j)
    return Kernel(with_broadcasts("centred", tuple(w.nodes)), {"B": DENSE}, "X", DENSE)


def test_a_deadlock_names_the_cycle_of_nodes():
    array = np.arange(40.0).reshape(2, 20)
    want = array - array.sum(axis=1, keepdims=True)
    assert np.array_equal(centred().run(run, {"B": array}, (2, 20), depth=24).outputs["X"].to_dense(), want)
    with pytest.raises(StreamDeadlock) as caught:
        centred().run(run, {"B": array}, (2, 20), depth=8)
    for name in ("B_vals_val_copies", "reduce", "repeat_sum_j", "sub", "depth 8", "deeper channels"):
        assert name in str(caught.value)


def test_a_trace_has_every_stream():
    m = small(20)
    result = matmul("ikj").run(run, m, (50, 50), trace=True)
    stream = result.streams[Port("spacc", "val")]
    assert stream.values is not None
    assert stream.values[stream.tags >= 0].sum() == 7366
    assert len(stream) == result.node("X_vals_write").tokens_in
    assert result.streams[Port("B_i", "ref")].values is None
    assert (np.diff(stream.times) >= 0).all()


def test_tiles():
    """A matmul of 4 x 4 tiles in 2 x 2 blocks, with the block timings."""
    blocked = Format(("compressed", "compressed"), block=4)
    w = Wiring()
    i, row = w.scan("B", "i", 0, w.root("B"))
    k, b_ref, c_ref = w.meet(
        "intersect", "k", w.scan("B", "k", 1, row), w.scan("C", "k", 0, w.repeat("C_i", w.root("C"), row))
    )
    j, j_ref = w.scan("C", "j", 1, c_ref)
    product = w.alu("matmul", w.array("B", w.repeat("B_j", b_ref, j_ref)), w.array("C", j_ref))
    crd, val = w.accumulate(product, j, k)
    w.write("X", val, i, crd)
    graph = with_broadcasts("tiles", tuple(w.nodes), 4)
    b, c = hashed(8, 2, 1), hashed(8, 3, 2)
    tensors = {name: pack(name, x, blocked) for name, x in (("B", b), ("C", c))}
    shapes = {"X": ((8, 8), blocked)}
    result = run(graph, tensors, shapes=shapes)
    assert np.allclose(result.outputs["X"].to_dense(), b @ c)
    products = int(result.node("matmul").flops / (2 * 4**3))
    assert result.node("matmul").busy >= 4 * products
    assert result.cycles > run(graph, tensors, shapes=shapes, timing=Timing("scalar")).cycles
    with pytest.raises(SparseError, match="blocks of 1"):
        run(graph, {n: pack(n, x, DCSR) for n, x in (("B", b), ("C", c))}, shapes=shapes)


@pytest.mark.parametrize(
    ("timing", "kind", "op", "block", "cost"),
    [
        (COMAL, "scan", "", 1, (1, 1)),
        (COMAL, "broadcast", "", 1, (0, 1)),
        (COMAL, "crd_drop", "", 1, (0, 1)),
        (COMAL, "alu", "mul", 1, (1, 1)),
        (COMAL, "alu", "matmul", 16, (16, 31)),
        (COMAL, "alu", "add", 16, (1, 256)),
        (COMAL, "alu", "mul", 16, (1, 256)),
        (COMAL, "alu", "unary", 16, (1, 16)),
        (COMAL, "array", "", 16, (1, 256)),
        (COMAL, "reduce", "add", 16, (1, 256)),
        (COMAL, "spacc", "", 16, (1, 1)),
        (Timing("scalar"), "alu", "matmul", 16, (1, 1)),
        (Timing("block_scalar", 16), "alu", "mul", 1, (16, 256)),
        (Timing("block_scalar", 16), "alu", "add", 1, (1, 256)),
    ],
)
def test_the_timing_table(timing, kind, op, block, cost):
    assert timing.of(kind, op, block) == cost


def test_every_kind_of_node_has_a_meaning_and_a_cost():
    assert set(MEANING) == set(NODES)
    for kind in NODES:
        assert COMAL.of(kind)[1] == 1


def test_impossible_timings():
    for wrong in ({"mode": "fast"}, {"block": 0}, {"channel_latency": -1}, {"style": "dam"}):
        with pytest.raises(SparseError):
            Timing(**wrong)
    with pytest.raises(SparseError, match="no timing"):
        COMAL.of("teleport")


def test_what_is_missing_is_named():
    kernel, m = matmul("ikj"), small(20)
    tensors = kernel.tensors(m)
    with pytest.raises(SparseError, match="tensor 'C'"):
        run(kernel.graph, {"B": tensors["B"]}, shapes={"X": ((50, 50), DCSR)})
    with pytest.raises(SparseError, match="result 'X'"):
        run(kernel.graph, tensors, shapes={})
    with pytest.raises(SparseError, match="depth 0"):
        run(kernel.graph, tensors, shapes={"X": ((50, 50), DCSR)}, depth=0)
    with pytest.raises(SparseError, match="loop order"):
        matmul("iki")
    with pytest.raises(SparseError, match="style"):
        sddmm("guess")


def test_a_result_that_is_a_scalar():
    w = Wiring()
    _, ref = w.scan("A", "i", 0, w.root("A"))
    w.write("X", w.reduce(w.array("A", ref)))
    graph = with_broadcasts("sum", tuple(w.nodes))
    result = run(graph, {"A": pack("A", np.arange(5.0), Format(("dense",)))}, shapes={"X": ((), Format(()))})
    assert result.outputs["X"].values.tolist() == [10.0]


S0, S1 = -3, -4


@pytest.mark.parametrize("levels", [(a, b) for a in ("dense", "compressed") for b in ("dense", "compressed")])
def test_assembled_levels(levels):
    """Row 0 holds columns 0 and 1, row 1 nothing, row 2 column 1."""
    crds = [np.array([0, 1, 2, S0]), np.array([0, 1, S0, S0, 1, S1])]
    tensor = assemble("X", (3, 2), Format(levels), crds, np.array([5.0, 6.0, 7.0]))
    assert np.array_equal(tensor.to_dense(), [[5, 6], [0, 0], [0, 7]])
    transposed = assemble("X", (2, 3), Format(levels, (1, 0)), crds, np.array([5.0, 6.0, 7.0]))
    assert np.array_equal(transposed.to_dense(), tensor.to_dense().T)


@pytest.mark.parametrize(
    ("crds", "values"),
    [
        ([[0, S0], [0, S0, 1, S1]], [1.0, 2.0]),  # two rows of values, one of coordinates
        ([[S0], [1, S1]], [1.0]),  # a row that is not there has a column
        ([[0, S0], [0, S1]], [1.0, 2.0]),  # too many values
        ([[0, S0], [9, S1]], [1.0]),  # a column that is out of the shape
        ([[0, S0]], [1.0]),  # a level is missing
        ([[0, S0], [0, 1]], [1.0, 2.0]),  # no end
    ],
)
def test_results_that_do_not_fit_together(crds, values):
    with pytest.raises(SparseError):
        assemble("X", (3, 2), DCSR, [np.array(x) for x in crds], np.array(values))


def test_a_node_that_waits_for_more_than_comes():
    node = Node("add", "alu", (("a", Port("x", "val")), ("b", Port("y", "val"))), (("op", "add"),))
    with pytest.raises(SparseError, match="ends before done"):
        run_node(node, {"a": [(0, 1.0)], "b": []})
    with pytest.raises(SparseError, match="operation 'mix'"):
        run_node(Node("mix", "alu", node.ins, (("op", "mix"),)), {"a": [(0, 1.0)], "b": [(0, 1.0)]})
