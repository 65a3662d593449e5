"""Stream graphs wired by hand: the kernels that fuseflow.md gives reference cycle counts for, and a builder of such."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np

from tilestream.errors import SparseError
from tilestream.sparse.storage import Format, SparseTensor, pack
from tilestream.sparse.stream.graph import Graph, Node, Port, with_broadcasts
from tilestream.sparse.stream.result import Result

DCSR = Format(("compressed", "compressed"))
DCSC = Format(("compressed", "compressed"), (1, 0))
DENSE = Format(("dense", "dense"))
DENSE_COLUMNS = Format(("dense", "dense"), (1, 0))


class Wiring:
    """Nodes in the order in which they are added; streams are ports, read as often as one likes."""

    def __init__(self) -> None:
        self.nodes: list[Node] = []

    def add(self, kind: str, name: str, attrs: Mapping[str, str | int | float] | None = None, /, **ins: Port) -> str:
        """A node; its name, of which ``Port(name, "out")`` is an output. ``in_`` stands for the port ``in``."""
        given = tuple(("in" if port == "in_" else port, stream) for port, stream in ins.items())
        self.nodes.append(Node(name, kind, given, tuple((attrs or {}).items())))
        return name

    def root(self, tensor: str) -> Port:
        return Port(self.add("root", f"root_{tensor}"), "ref")

    def scan(self, tensor: str, index: str, level: int, ref: Port) -> tuple[Port, Port]:
        """(coordinates, references) of a level."""
        name = self.add("scan", f"{tensor}_{index}", {"tensor": tensor, "level": level}, ref=ref)
        return Port(name, "crd"), Port(name, "ref")

    def repeat(self, name: str, stream: Port, over: Port) -> Port:
        """Each element of ``stream`` once for each one of ``over``, which is a level below it."""
        signal = self.add("repsig", f"repeat_{name}_sig", in_=over)
        return Port(self.add("repeat", f"repeat_{name}", in_=stream, sig=Port(signal, "sig")), "out")

    def meet(self, kind: str, name: str, *operands: tuple[Port, Port]) -> tuple[Port, ...]:
        """(coordinates, payload of each operand) of an intersect or union of (coordinates, payload) pairs."""
        ins = {f"crd{i}": crd for i, (crd, _) in enumerate(operands)}
        ins |= {f"in{i}": payload for i, (_, payload) in enumerate(operands)}
        self.add(kind, name, **ins)
        return (Port(name, "crd"), *(Port(name, f"out{i}") for i in range(len(operands))))

    def locate(self, tensor: str, index: str, level: int, crd: Port, ref: Port) -> Port:
        """Children of ``crd`` in a dense level; ``ref`` has the structure of ``crd``."""
        name = self.add("locate", f"{tensor}_{index}", {"tensor": tensor, "level": level}, crd=crd, ref=ref)
        return Port(name, "ref")

    def array(self, tensor: str, ref: Port) -> Port:
        return Port(self.add("array", f"{tensor}_vals", {"tensor": tensor}, ref=ref), "val")

    def alu(self, op: str, a: Port, b: Port, name: str = "") -> Port:
        return Port(self.add("alu", name or op, {"op": op}, a=a, b=b), "val")

    def reduce(self, val: Port, over: Port | None = None, name: str = "reduce") -> Port:
        """The sum of each fiber. ``over``: the coordinates of the sums, where a fiber of those can be empty."""
        if over is None:
            return Port(self.add("reduce", name, {"op": "add"}, val=val), "val")
        return Port(self.add("spacc", name, {"order": 0, "op": "add"}, crd0=over, val=val), "val")

    def accumulate(self, val: Port, *crds: Port, name: str = "spacc") -> tuple[Port, ...]:
        """(coordinates, innermost first, ..., values) of a sparse accumulator; the last of ``crds`` is reduced."""
        self.add("spacc", name, {"order": len(crds) - 1}, **{f"crd{i}": c for i, c in enumerate(crds)}, val=val)
        return (*(Port(name, f"crd{i}") for i in range(len(crds) - 1)), Port(name, "val"))

    def write(self, tensor: str, val: Port, *crds: Port) -> None:
        """Writers of a result, coordinates outermost first."""
        for level, crd in enumerate(crds):
            self.add("write_crd", f"{tensor}_{level}_write", {"tensor": tensor, "level": level}, crd=crd)
        self.add("write_val", f"{tensor}_vals_write", {"tensor": tensor}, val=val)


@dataclass(frozen=True)
class Kernel:
    """A graph, the formats that it reads its tensors in, and the one that it writes ``result`` in."""

    graph: Graph
    formats: Mapping[str, Format]
    result: str
    format: Format

    def tensors(self, arrays: Mapping[str, np.ndarray]) -> dict[str, SparseTensor]:
        """The arrays in the kernel's formats."""
        return {name: pack(name, arrays[name], format) for name, format in self.formats.items()}

    def run(self, engine: Callable[..., Result], arrays: Mapping[str, np.ndarray], shape: tuple[int, ...], **options):
        """The ``Result`` of an engine (``run_spec.run``, ``engine.run``) on dense arrays."""
        return engine(self.graph, self.tensors(arrays), shapes={self.result: (shape, self.format)}, **options)


def hashed(n: int, d: int, seed: int) -> np.ndarray:
    """The reference matrices A_s: [n, n] integers, of which about one in ``d`` is not zero."""
    i, j = np.mgrid[0:n, 0:n].astype(np.uint64)
    word = np.uint64(0xFFFFFFFF)
    x = (i * np.uint64(2654435761) + j * np.uint64(40503) + np.uint64(seed * 97)) & word
    for shift, factor in ((15, 2246822519), (13, 3266489917)):
        x = ((x ^ (x >> np.uint64(shift))) * np.uint64(factor)) & word
    x ^= x >> np.uint64(16)
    value = 1 + (x >> np.uint64(8)) % np.uint64(9)
    return np.where(x % np.uint64(d) == 0, value, 0).astype(np.float64)


def elementwise(op: str) -> Kernel:
    """X = B op C with ``op`` mul (intersections) or add (unions)."""
    w = Wiring()
    kind = "intersect" if op == "mul" else "union"
    rows = [w.scan(t, "i", 0, w.root(t)) for t in "BC"]
    i, *refs = w.meet(kind, "meet_i", *rows)
    columns = [w.scan(t, "j", 1, ref) for t, ref in zip("BC", refs, strict=True)]
    j, *refs = w.meet(kind, "meet_j", *columns)
    b, c = (w.array(t, ref) for t, ref in zip("BC", refs, strict=True))
    w.write("X", w.alu(op, b, c), i, j)
    return Kernel(with_broadcasts(f"elem{op}", tuple(w.nodes)), {"B": DCSR, "C": DCSR}, "X", DCSR)


def matmul(order: str = "ikj") -> Kernel:
    """X_ij = B_ik C_kj by any loop order of i, j, k; what is read and written is stored as the order needs.

    Raises:
        SparseError: an order that is none.
    """
    if sorted(order) != ["i", "j", "k"]:
        raise SparseError(f"loop order {order!r}", "use i, j and k once each, for example ikj")
    # Of the two matrices, the first is the one that holds the outer of i and j.
    outer, inner = (x for x in order if x != "k")
    first, second = ("B", "C") if outer == "i" else ("C", "B")
    w = Wiring()
    {"k": _product_outer, outer: _product_rows if order[1] == "k" else _product_inner}[order[0]](
        w, first, second, outer, inner
    )
    loops = {first: (outer, "k"), second: ("k", inner)}
    kept = {t: tuple(sorted(x, key=order.index)) for t, x in loops.items()}
    formats = {t: DCSR if "".join(kept[t]) in ("ik", "kj") else DCSC for t in "BC"}
    result = DCSR if outer == "i" else DCSC
    return Kernel(with_broadcasts(f"matmul_{order}", tuple(w.nodes)), formats, "X", result)


def _product_rows(w: Wiring, first: str, second: str, outer: str, inner: str) -> None:
    row, row_ref = w.scan(first, outer, 0, w.root(first))
    other = w.repeat(f"{second}_{outer}", w.root(second), row_ref)
    k, a_ref, b_ref = w.meet("intersect", "meet_k", w.scan(first, "k", 1, row_ref), w.scan(second, "k", 0, other))
    column, column_ref = w.scan(second, inner, 1, b_ref)
    a = w.array(first, w.repeat(f"{first}_{inner}", a_ref, column_ref))
    crd, val = w.accumulate(w.alu("mul", a, w.array(second, column_ref)), column, k)
    w.write("X", val, row, crd)


def _product_inner(w: Wiring, first: str, second: str, outer: str, inner: str) -> None:
    row, row_ref = w.scan(first, outer, 0, w.root(first))
    other = w.repeat(f"{second}_{outer}", w.root(second), row_ref)
    column, column_ref = w.scan(second, inner, 0, other)
    again = w.repeat(f"{first}_{inner}", row_ref, column_ref)
    _, a_ref, b_ref = w.meet("intersect", "meet_k", w.scan(first, "k", 1, again), w.scan(second, "k", 1, column_ref))
    val = w.reduce(w.alu("mul", w.array(first, a_ref), w.array(second, b_ref)), column)
    w.write("X", val, row, column)


def _product_outer(w: Wiring, first: str, second: str, outer: str, inner: str) -> None:
    k, a_ref, b_ref = w.meet(
        "intersect", "meet_k", w.scan(first, "k", 0, w.root(first)), w.scan(second, "k", 0, w.root(second))
    )
    row, row_ref = w.scan(first, outer, 1, a_ref)
    column, column_ref = w.scan(second, inner, 1, w.repeat(f"{second}_{outer}", b_ref, row_ref))
    a = w.array(first, w.repeat(f"{first}_{inner}", row_ref, column_ref))
    inner_crd, outer_crd, val = w.accumulate(w.alu("mul", a, w.array(second, column_ref)), column, row, k)
    w.write("X", val, outer_crd, inner_crd)


def matmul_dense() -> Kernel:
    """X_ij = B_ik C_kj with a dense C, in the order ikj: C's rows are located, not intersected."""
    w = Wiring()
    i, i_ref = w.scan("B", "i", 0, w.root("B"))
    rows = w.repeat("C_i", w.root("C"), i_ref)
    k, k_ref = w.scan("B", "k", 1, i_ref)
    row = w.locate("C", "k", 0, k, w.repeat("C_k", rows, k_ref))
    j, j_ref = w.scan("C", "j", 1, row)
    b = w.array("B", w.repeat("B_j", k_ref, j_ref))
    crd, val = w.accumulate(w.alu("mul", b, w.array("C", j_ref)), j, k)
    w.write("X", val, i, crd)
    return Kernel(with_broadcasts("matmul_dense", tuple(w.nodes)), {"B": DCSR, "C": DENSE}, "X", DCSR)


def chain() -> Kernel:
    """X_il = (B_ik C_kj) W_jl in one graph, in the order i k j l: the first product's rows feed the second."""
    w = Wiring()
    i, i_ref = w.scan("B", "i", 0, w.root("B"))
    k, b_ref, c_ref = w.meet(
        "intersect", "meet_k", w.scan("B", "k", 1, i_ref), w.scan("C", "k", 0, w.repeat("C_i", w.root("C"), i_ref))
    )
    j, j_ref = w.scan("C", "j", 1, c_ref)
    b = w.array("B", w.repeat("B_j", b_ref, j_ref))
    crd, val = w.accumulate(w.alu("mul", b, w.array("C", j_ref)), j, k)
    rows = w.repeat("W_i", w.root("W"), i_ref)
    both, val, w_ref = w.meet("intersect", "meet_j", (crd, val), w.scan("W", "j", 0, rows))
    ll, l_ref = w.scan("W", "l", 1, w_ref)
    val = w.repeat("val_l", val, l_ref)
    crd, val = w.accumulate(w.alu("mul", val, w.array("W", l_ref), "mul_l"), ll, both, name="spacc_l")
    w.write("X", val, i, crd)
    return Kernel(with_broadcasts("chain", tuple(w.nodes)), dict.fromkeys("BCW", DCSR), "X", DCSR)


def matmul_parallel(ways: int, ordered: bool = False) -> Kernel:
    """X_ij = B_ik C_kj in the order ikj, B's rows dealt to ``ways`` copies of all below them.

    ``ordered``: the joins are told how many rows there are, and are right for fewer rows than ways too.
    """
    w = Wiring()
    i, i_ref = w.scan("B", "i", 0, w.root("B"))
    w.add("fork", "fork_i", {"ways": ways}, in_=i_ref)
    crds, vals = [], []
    for p in range(ways):
        row = Port("fork_i", f"out{p}")
        root = Port(w.add("root", f"root_C_{p}"), "ref")
        rows = w.repeat(f"C_i_{p}", root, row)
        b_k = w.add("scan", f"B_k_{p}", {"tensor": "B", "level": 1}, ref=row)
        c_k = w.add("scan", f"C_k_{p}", {"tensor": "C", "level": 0}, ref=rows)
        pairs = [(Port(x, "crd"), Port(x, "ref")) for x in (b_k, c_k)]
        k, b_ref, c_ref = w.meet("intersect", f"meet_k_{p}", *pairs)
        c_j = w.add("scan", f"C_j_{p}", {"tensor": "C", "level": 1}, ref=c_ref)
        j, j_ref = Port(c_j, "crd"), Port(c_j, "ref")
        b_ref = w.repeat(f"B_j_{p}", b_ref, j_ref)
        b, c = (
            Port(w.add("array", f"{t}_vals_{p}", {"tensor": t}, ref=ref), "val")
            for t, ref in (("B", b_ref), ("C", j_ref))
        )
        crd, val = w.accumulate(w.alu("mul", b, c, f"mul_{p}"), j, k, name=f"spacc_{p}")
        crds.append(crd)
        vals.append(val)
    joined = []
    for name, parts in (("join_crd", crds), ("join_val", vals)):
        ins = {f"in{p}": stream for p, stream in enumerate(parts)} | ({f"in{ways}": i_ref} if ordered else {})
        attrs = {"level": 1} | ({"ordered": 1} if ordered else {})
        joined.append(Port(w.add("join", name, attrs, **ins), "out"))
    w.write("X", joined[1], i, joined[0])
    return Kernel(with_broadcasts(f"matmul_x{ways}", tuple(w.nodes)), {"B": DCSR, "C": DCSR}, "X", DCSR)


def sddmm(style: str = "locate") -> Kernel:
    """X_ij = B_ij (C_ik D_kj) with a sparse B and dense C and D, in the order i j k.

    ``style``: ``"locate"`` looks up the rows and columns that B asks for; ``"coiterate"`` scans all of them and
    intersects; ``"product"`` is the dense product alone, of which ``elementwise("mul")`` then is the second kernel
    of the unfused version.

    Raises:
        SparseError: another style.
    """
    if style not in ("locate", "coiterate", "product"):
        raise SparseError(f"style {style!r}", "use locate, coiterate or product")
    w = Wiring()
    formats = {"C": DENSE, "D": DENSE_COLUMNS}
    if style == "product":
        i, c_row = w.scan("C", "i", 0, w.root("C"))
        j, d_col = w.scan("D", "j", 0, w.repeat("D_i", w.root("D"), c_row))
        c_row = w.repeat("C_j", c_row, d_col)
    else:
        formats = {"B": DCSR, **formats}
        i, b_row = w.scan("B", "i", 0, w.root("B"))
        if style == "locate":
            c_row = w.locate("C", "i", 0, i, w.repeat("C_root", w.root("C"), b_row))
        else:
            i, b_row, c_row = w.meet("intersect", "meet_i", (i, b_row), w.scan("C", "i", 0, w.root("C")))
        columns = w.repeat("D_i", w.root("D"), b_row)
        j, b_ref = w.scan("B", "j", 1, b_row)
        if style == "locate":
            d_col = w.locate("D", "j", 0, j, w.repeat("D_j", columns, b_ref))
        else:
            j, b_ref, d_col = w.meet("intersect", "meet_j", (j, b_ref), w.scan("D", "j", 0, columns))
        c_row = w.repeat("C_j", c_row, d_col)
    c_k, d_k = w.scan("C", "k", 1, c_row), w.scan("D", "k", 1, d_col)
    _, c_ref, d_ref = w.meet("intersect", "meet_k", c_k, d_k)
    val = w.reduce(w.alu("mul", w.array("C", c_ref), w.array("D", d_ref)), j)
    if style != "product":
        val = w.alu("mul", w.array("B", b_ref), val, "mask")
    w.write("X", val, i, j)
    return Kernel(with_broadcasts(f"sddmm_{style}", tuple(w.nodes)), formats, "X", DCSR)
