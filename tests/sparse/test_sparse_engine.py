"""The fast engine against the specification: every token, its time and value, and every figure, on everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tilestream.errors import SparseError
from tilestream.sparse import engine, run_spec
from tilestream.sparse.kernels import (
    Wiring,
    chain,
    elementwise,
    hashed,
    matmul,
    matmul_dense,
    matmul_parallel,
    sddmm,
)
from tilestream.sparse.memory import NO_MEMORY, SIMPLE_HBM, Memory, hbm
from tilestream.sparse.storage import Format, Level, SparseTensor, pack
from tilestream.sparse.stream.graph import ALU_UNARY, Graph, Node, Port, with_broadcasts
from tilestream.sparse.stream.result import Result
from tilestream.sparse.timing import COMAL, SAM, Timing

Shapes = Mapping[str, tuple[tuple[int, ...], Format]]


def same(graph: Graph, tensors: Mapping[str, SparseTensor], shapes: Shapes, **options) -> Result:
    """Runs both; the engine's result, once it is known to be the specification's."""
    fast = engine.run(graph, tensors, shapes=shapes, trace=True, **options)
    slow = run_spec.run(graph, tensors, shapes=shapes, trace=True, **options)
    assert fast.nodes == slow.nodes
    assert (fast.cycles, fast.flops, fast.bytes) == (slow.cycles, slow.flops, slow.bytes)
    assert fast.streams.keys() == slow.streams.keys()
    for port, stream in slow.streams.items():
        mine = fast.streams[port]
        np.testing.assert_array_equal(mine.tags, stream.tags, str(port))
        np.testing.assert_array_equal(mine.times, stream.times, str(port))
        assert (mine.values is None) == (stream.values is None), port
        if mine.values is not None and stream.values is not None:
            elements = stream.tags >= 0
            np.testing.assert_allclose(mine.values[elements], stream.values[elements], rtol=1e-12, atol=1e-14)
    for name, tensor in slow.outputs.items():
        mine = fast.outputs[name]
        np.testing.assert_allclose(mine.values, tensor.values, rtol=1e-12, atol=1e-14)
        for a, b in zip(mine.levels, tensor.levels, strict=True):
            assert a.compressed == b.compressed
            if a.compressed:
                np.testing.assert_array_equal(a.seg, b.seg)
                np.testing.assert_array_equal(a.crd, b.crd)
    return fast


def random_tensor(seed: int, shape: tuple[int, ...], density: float) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.where(rng.random(shape) < density, rng.integers(-9, 10, shape), 0).astype(np.float64)


KERNELS = {
    **{f"matmul {order}": lambda order=order: matmul(order) for order in ("ijk", "ikj", "jik", "jki", "kij", "kji")},
    "elementwise mul": lambda: elementwise("mul"),
    "elementwise add": lambda: elementwise("add"),
    "dense": matmul_dense,
    "chain": chain,
    "parallel": lambda: matmul_parallel(3, ordered=True),
    "parallel unordered": lambda: matmul_parallel(2),
    "sddmm locate": lambda: sddmm("locate"),
    "sddmm coiterate": lambda: sddmm("coiterate"),
}


def arrays(n: int, d: int) -> dict[str, np.ndarray]:
    return {name: hashed(n, d, seed) for name, seed in (("B", 1), ("C", 2), ("W", 3))} | {"D": np.ones((n, n))}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize(
    "timing", [COMAL, SAM, Timing("block_scalar", 4, channel_latency=3)], ids=["comal", "sam", "slow"]
)
@pytest.mark.every(3)
def test_kernels_run_as_specified(name: str, timing: Timing):
    kernel, n = KERNELS[name](), 16
    given_arrays = arrays(n, 3)
    if name.startswith("sddmm"):
        given_arrays |= {"C": np.ones((n, 5)), "D": np.ones((5, n))}
    same(kernel.graph, kernel.tensors(given_arrays), {kernel.result: ((n, n), kernel.format)}, timing=timing)


@pytest.mark.parametrize(
    ("name", "d", "cycles"),
    [
        ("elementwise mul", 20, 266),
        ("matmul ikj", 20, 2145),
        ("matmul ijk", 20, 12731),
        ("chain", 20, 2238),
        ("elementwise mul", 4, 1120),
        ("elementwise add", 4, 1120),
        ("matmul ikj", 4, 7969),
        ("matmul ijk", 4, 55135),
        ("chain", 4, 33874),
    ],
)
def test_cycles_are_the_references(name: str, d: int, cycles: int):
    kernel = KERNELS[name]()
    found = kernel.run(engine.run, arrays(50, d), (50, 50)).cycles
    assert abs(found - cycles) <= 0.005 * cycles


DIAGONAL = np.diag(np.arange(1.0, 65.0))
"""Fibers of one element: where the ends of fibers weigh most."""


@pytest.mark.parametrize(
    ("order", "b", "c", "cycles"),
    [
        ("kij", hashed(50, 20, 1), hashed(50, 20, 2), 745),
        ("kji", hashed(50, 20, 1), hashed(50, 20, 2), 755),
        ("ikj", hashed(50, 20, 1), hashed(50, 20, 2), 2149),
        ("jki", hashed(50, 20, 1), hashed(50, 20, 2), 2101),
        ("ijk", hashed(50, 20, 1), hashed(50, 20, 2), 12730),
        ("kij", hashed(20, 8, 1), hashed(20, 8, 2), 303),
        ("kji", hashed(20, 8, 1), hashed(20, 8, 2), 301),
        ("kij", DIAGONAL, DIAGONAL, 270),
    ],
)
def test_cycles_as_sam_times_them(order: str, b: np.ndarray, c: np.ndarray, cycles: int):
    """SAM's simulator in Python, whose every stage takes a cycle; by Comal's timing the last is 23.7 % off."""
    found = matmul(order).run(engine.run, {"B": b, "C": c}, b.shape, timing=SAM).cycles
    assert abs(found - cycles) <= 0.005 * cycles


@settings(max_examples=40, deadline=None)
@given(
    st.sampled_from(["matmul ikj", "matmul kij", "matmul ijk", "elementwise mul", "elementwise add", "chain"]),
    st.integers(1, 7),
    st.sampled_from([0.0, 0.1, 0.4, 1.0]),
    st.sampled_from([None, 1, 2, 3, 7]),
    st.sampled_from([COMAL, SAM]),
    st.integers(0, 1000),
)
def test_random_matrices_and_depths(name: str, n: int, density: float, depth: int | None, timing: Timing, seed: int):
    kernel = KERNELS[name]()
    tensors = kernel.tensors({x: random_tensor(seed + i, (n, n), density) for i, x in enumerate("BCW")})
    shapes = {kernel.result: ((n, n), kernel.format)}
    outcome = _outcome(run_spec.run, kernel.graph, tensors, shapes, depth=depth, timing=timing)
    assert _outcome(engine.run, kernel.graph, tensors, shapes, depth=depth, timing=timing) == outcome
    if isinstance(outcome, int):
        same(kernel.graph, tensors, shapes, depth=depth, timing=timing)


def _outcome(run: Callable[..., Result], graph: Graph, tensors, shapes: Shapes, **options) -> int | str:
    """Cycles, or the kind of error."""
    try:
        return run(graph, tensors, shapes=shapes, **options).cycles
    except Exception as error:
        return type(error).__name__


def scan_all(w: Wiring, tensor: str, rank: int) -> tuple[list[Port], Port]:
    """Coordinates of every level, outermost first, and the values."""
    ref, crds = w.root(tensor), []
    for level in range(rank):
        crd, ref = w.scan(tensor, "ijklm"[level], level, ref)
        crds.append(crd)
    return crds, w.array(tensor, ref)


def sum_over(rank: int, level: int, op: str = "add") -> Graph:
    """The sum (or largest value) of a tensor over one of its levels."""
    w = Wiring()
    crds, val = scan_all(w, "T", rank)
    below = crds[level:] if level < rank - 1 else [crds[rank - 2]]
    order = rank - 1 - level
    ins = {f"crd{i}": crd for i, crd in enumerate(reversed(below))}
    w.add("spacc", "sums", {"order": order, "op": op}, **ins, val=val)
    kept = crds[:level] + [Port("sums", f"crd{i}") for i in reversed(range(order))]
    w.write("X", Port("sums", "val"), *kept)
    return with_broadcasts("sum", tuple(w.nodes))


@settings(max_examples=40, deadline=None)
@given(
    st.integers(2, 4).flatmap(lambda rank: st.tuples(st.just(rank), st.integers(0, rank - 1))),
    st.sampled_from(["add", "max"]),
    st.sampled_from([0.0, 0.05, 0.3, 1.0]),
    st.lists(st.sampled_from(["dense", "compressed"]), min_size=4, max_size=4),
    st.sampled_from([None, 2, 5]),
    st.sampled_from([COMAL, SAM]),
    st.integers(0, 1000),
)
def test_sums_over_any_level(
    at: tuple[int, int], op: str, density: float, levels: list[str], depth: int | None, timing: Timing, seed: int
):
    """Sparse accumulators of orders 0 to 3, over empty fibers of every kind."""
    rank, level = at
    shape = (3, 2, 4, 3)[:rank]
    tensors = {"T": pack("T", random_tensor(seed, shape, density), Format(tuple(levels[:rank])))}
    shapes = {"X": ((*shape[:level], *shape[level + 1 :]), Format(("compressed",) * (rank - 1)))}
    graph = sum_over(rank, level, op)
    outcome = _outcome(run_spec.run, graph, tensors, shapes, depth=depth, timing=timing)
    assert _outcome(engine.run, graph, tensors, shapes, depth=depth, timing=timing) == outcome
    if isinstance(outcome, int):
        result = same(graph, tensors, shapes, depth=depth, timing=timing)
        if op == "add":
            np.testing.assert_allclose(result.outputs["X"].to_dense(), tensors["T"].to_dense().sum(axis=level))


def sink(w: Wiring, *streams: Port) -> None:
    """Something that reads streams, so that they are traced."""
    for i, stream in enumerate(streams):
        w.add("repsig", f"sink{i}", in_=stream)


@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from(["intersect", "union"]),
    st.integers(2, 4),
    st.sampled_from([0.1, 0.4, 1.0]),
    st.sampled_from([None, 1, 4]),
    st.integers(0, 1000),
)
def test_nested_joiners_drop_and_hold(kind: str, operands: int, density: float, depth: int | None, seed: int):
    w, n = Wiring(), 5
    names = [f"T{i}" for i in range(operands)]
    outer, *refs = w.meet(kind, "rows", *(w.scan(t, "i", 0, w.root(t)) for t in names))
    inner, *refs = w.meet(kind, "columns", *(w.scan(t, "j", 1, r) for t, r in zip(names, refs, strict=True)))
    w.add("crd_hold", "hold", outer=outer, inner=inner)
    w.add("crd_drop", "drop", outer=outer, inner=inner)
    values = [w.array(t, ref) for t, ref in zip(names, refs, strict=True)]
    w.add("crd_drop", "drop_values", outer=outer, inner=values[0])
    w.add("val_drop", "drop_zeros", crd=inner, val=values[-1])
    sink(w, Port("hold", "outer"), *(Port(x, p) for x in ("drop", "drop_values") for p in ("outer", "inner")))
    sink_values = [Port("drop_zeros", p) for p in ("crd", "val")]
    w.add("repsig", "sink_crd", in_=sink_values[0])
    w.add("repsig", "sink_val", in_=sink_values[1])
    graph = with_broadcasts("joiners", tuple(w.nodes))
    tensors = {
        t: pack(t, random_tensor(seed + i, (n, n), density), Format(("compressed",) * 2)) for i, t in enumerate(names)
    }
    if _outcome(run_spec.run, graph, tensors, {}, depth=depth) == "StreamDeadlock":
        assert _outcome(engine.run, graph, tensors, {}, depth=depth) == "StreamDeadlock"
    else:
        same(graph, tensors, {}, depth=depth)


@settings(max_examples=30, deadline=None)
@given(
    st.integers(1, 4),
    st.integers(0, 2),
    st.booleans(),
    st.sampled_from([0.3, 0.8, 1.0]),
    st.sampled_from([None, 4]),
    st.integers(0, 1000),
)
def test_fork_and_join(ways: int, level: int, ordered: bool, density: float, depth: int | None, seed: int):
    """Rows are dealt, and what is ``level`` levels below them is joined again."""
    w = Wiring()
    crd, ref = w.scan("T", "i", 0, w.root("T"))
    w.add("fork", "deal", {"ways": ways}, in_=ref)
    ends = []
    for way in range(ways):
        stream = Port("deal", f"out{way}")
        for below in range(level):
            name = w.add("scan", f"T_{below}_{way}", {"tensor": "T", "level": below + 1}, ref=stream)
            stream = Port(name, "ref")
        ends.append(stream)
    ins = {f"in{i}": end for i, end in enumerate(ends)}
    if ordered:
        ins[f"in{ways}"] = crd
    w.add("join", "gather", {"level": level, "ordered": int(ordered)}, **ins)
    sink(w, Port("gather", "out"))
    graph = with_broadcasts("parallel", tuple(w.nodes))
    tensors = {"T": pack("T", random_tensor(seed, (5, 3, 3), density), Format(("compressed",) * 3))}
    outcome = _outcome(run_spec.run, graph, tensors, {}, depth=depth)
    assert _outcome(engine.run, graph, tensors, {}, depth=depth) == outcome
    if isinstance(outcome, int):
        same(graph, tensors, {}, depth=depth)


def unary_graph(op: str, block: int) -> Graph:
    w = Wiring()
    crds, val = scan_all(w, "T", 2)
    w.add("alu", "f", {"op": op, "unary": 1, "scalar": 11.0 if op == "cast" else 1.5}, a=val)
    w.write("X", Port("f", "val"), *crds)
    return with_broadcasts("unary", tuple(w.nodes), block)


@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize("op", [*ALU_UNARY, "rowsum", "rowmax", "transpose"])
def test_unary_operations(op: str, block: int):
    form = Format(("compressed", "compressed"), block=block)
    array = random_tensor(3, (8, 8), 0.5)
    array[0, :4] = -2.5, 0.5, 3.25, -0.0
    same(unary_graph(op, block), {"T": pack("T", array, form)}, {"X": ((8, 8), form)})


@pytest.mark.parametrize("block", [1, 2, 4])
@pytest.mark.parametrize("op", ["add", "sub", "mul", "div", "max", "min", "matmul", "matmul_t"])
def test_binary_operations_on_blocks(op: str, block: int):
    w = Wiring()
    i, b, c = w.meet("union", "i", *(w.scan(t, "i", 0, w.root(t)) for t in "BC"))
    j, b, c = w.meet("union", "j", *(w.scan(t, "j", 1, r) for t, r in (("B", b), ("C", c))))
    total = w.alu(op, w.array("B", b), w.array("C", c))
    w.add("reduce", "rows", {"op": "max"}, val=total)
    w.add("crd_drop", "drop", outer=i, inner=j)
    w.write("X", Port("rows", "val"), i)
    sink(w, Port("drop", "outer"))
    graph = with_broadcasts("binary", tuple(w.nodes), block)
    form = Format(("compressed", "compressed"), block=block)
    tensors = {t: pack(t, random_tensor(k, (8, 8), 0.2), form) for k, t in enumerate("BC")}
    if block == 1:
        same(graph, tensors, {"X": ((8,), Format(("compressed",)))})
        return
    nodes = tuple(n for n in graph.nodes if n.attr("tensor") != "X")  # a result of one index has no blocks
    same(Graph("blocks", nodes, block), tensors, {})


@pytest.mark.parametrize("memory", [NO_MEMORY, SIMPLE_HBM, hbm(scratchpad_bytes=4096)], ids=lambda m: m.kind)
@pytest.mark.parametrize("block", [1, 4])
@pytest.mark.every(3)
def test_times_do_not_need_values(block: int, memory: Memory):
    form = Format(("compressed", "compressed"), block=block)
    tensors = {"T": pack("T", random_tensor(3, (16, 16), 0.3), form)}
    graph, shapes = unary_graph("exp", block), {"X": ((16, 16), form)}
    whole = engine.run(graph, tensors, shapes=shapes, memory=memory, trace=True)
    timed = engine.run(graph, tensors, shapes=shapes, memory=memory, trace=True, values=False)
    assert (timed.nodes, timed.memory) == (whole.nodes, whole.memory)
    assert all((timed.streams[p].times == s.times).all() for p, s in whole.streams.items())
    assert timed.outputs["X"].values.shape == whole.outputs["X"].values.shape
    assert not timed.outputs["X"].values.any()
    kernel = chain()
    tensors, shapes = kernel.tensors(arrays(16, 3)), {"X": ((16, 16), kernel.format)}
    assert (
        engine.run(kernel.graph, tensors, shapes=shapes, values=False).nodes
        == same(kernel.graph, tensors, shapes).nodes
    )


@pytest.mark.early  # compiles the engine: half a minute
def test_errors_name_the_node():
    kernel = matmul("ikj")
    tensors = kernel.tensors(arrays(6, 2))
    with pytest.raises(SparseError, match="reads tensor 'C'"):
        engine.run(kernel.graph, {"B": tensors["B"]}, shapes={})
    with pytest.raises(SparseError, match="no shape"):
        engine.run(kernel.graph, tensors, shapes={})
    w = Wiring()
    w.add("alu", "mixed", {"op": "add"}, a=w.array("B", w.scan("B", "i", 0, w.root("B"))[1]), b=scan_all(w, "C", 2)[1])
    sink(w, Port("mixed", "val"))
    graph = with_broadcasts("wrong", tuple(w.nodes))
    for run in (engine.run, run_spec.run):
        with pytest.raises(SparseError, match=r"alu 'mixed'.*met"):
            run(graph, tensors, shapes={})
    with pytest.raises(SparseError, match="operation 'pow'"):
        engine.run(unary_graph("pow", 1), {"T": tensors["B"]}, shapes={"X": ((6, 6), kernel.format)})
    w = Wiring()
    crd, ref = w.scan("C", "i", 0, w.root("C"))
    sink(w, w.scan("C", "j", 1, w.scan("B", "j", 1, ref)[1])[0])  # references of one tensor into another
    graph = with_broadcasts("astray", tuple(w.nodes))
    small = kernel.tensors({"B": np.eye(6), "C": np.eye(6)}) | {"B": tensors["B"]}
    for memory in (NO_MEMORY, hbm()):
        with pytest.raises(SparseError, match=r"scan 'C_j'.*reference 6, of 6"):
            engine.run(graph, small, shapes={}, memory=memory)
    broken = SparseTensor(
        "B", (6, 6), kernel.format, (small["C"].levels[0], Level(6, np.array([0, 9]), np.zeros(3))), np.ones(3)
    )
    for run in (engine.run, run_spec.run):
        with pytest.raises(SparseError, match="segments"):
            run(graph, small | {"B": broken}, shapes={})
    node = Node("B_9", "scan", (("ref", Port("root_B", "ref")),), (("tensor", "B"), ("level", 9)))
    with pytest.raises(SparseError, match="level 9"):
        engine.run(Graph("deep", (Node("root_B", "root"), node)), tensors, shapes={})
