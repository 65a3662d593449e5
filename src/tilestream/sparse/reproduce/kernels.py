"""The hand-wired kernels beside the cycle counts of two reference simulators (section 6 of the notes)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilestream.sparse import engine
from tilestream.sparse import kernels as wired
from tilestream.sparse.kernels import Kernel, hashed
from tilestream.sparse.reproduce import paper
from tilestream.sparse.reproduce.study import Options, Study, off
from tilestream.sparse.result import Result
from tilestream.sparse.storage import SparseTensor


def _make(name: str) -> Kernel:
    kind, *rest = name.split()
    if kind == "elemmul" or kind == "elemadd":
        return wired.elementwise(kind[4:])
    if name == "matmul ikj dense":
        return wired.matmul_dense()
    if kind == "chain":
        return wired.chain() if rest == ["ikjl"] else wired.matmul("ikj")
    if len(rest) == 2:
        return wired.matmul_parallel(int(rest[1][1:]))
    return wired.matmul(rest[0])


def _arrays(name: str, n: int, d: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Operands and the expected result."""
    b, c, w = (hashed(n, d, seed) for seed in (1, 2, 3))
    if name == "matmul ikj dense":
        k, j = np.mgrid[0:n, 0:16]
        c = ((7 * k + 3 * j) % 5 + 1).astype(np.float64)
        return {"B": b, "C": c}, b @ c
    if name == "chain ikjl":
        return {"B": b, "C": c, "W": w}, b @ c @ w
    if name == "chain second":
        return {"B": b @ c, "C": w}, b @ c @ w
    if name.startswith("elem"):
        return {"B": b, "C": c}, b * c if name == "elemmul" else b + c
    return {"B": b, "C": c}, b @ c


def reference(options: Options, run: Callable[..., Result] = engine.run) -> Study:
    """Every kernel and order that has a reference: cycles, values written, and the sum of the values."""
    rows = []
    for case in paper.KERNELS:
        kernel = _make(case.name)
        arrays, expected = _arrays(case.name, case.n, case.d)
        result = kernel.run(run, arrays, expected.shape)
        made: SparseTensor = result.outputs[kernel.result]
        wanted = case.comal or case.sam
        rows.append(
            {
                "kernel": case.name,
                "n": case.n,
                "d": case.d,
                "cycles": result.cycles,
                "Comal": case.comal,
                "SAM in Python": case.sam,
                "off": off(result.cycles, wanted),
                "values written": made.nnz,
                "reference values": case.values,
                "sum": float(made.values.sum()),
                "reference sum": case.total,
                "exact": bool(np.array_equal(made.to_dense(), expected)),
            }
        )
    notes = (
        "The orders that begin with k have no count of Comal; SAM's simulator differs by 42 cycles, about one a row of "
        "the result, in how its accumulator of two levels gives its sums out.",
    )
    source = "reference counts of Comal's nodes and of SAM's Python simulator"
    return Study("kernels", "Kernels", source, tuple(rows), notes)


def sddmm(options: Options, run: Callable[..., Result] = engine.run) -> Study:
    """``X = B * (C D)`` where B asks: co-iterating, locating, and as two kernels."""
    rows = []
    b = hashed(50, 20, 1)
    for inner in (1, 10, 100):
        arrays = {"B": b, "C": np.ones((50, inner)), "D": np.ones((inner, 50))}
        expected = b * (arrays["C"] @ arrays["D"])
        measured = {}
        for name, style in (("co-iteration fused", "coiterate"), ("locate fused", "locate")):
            result = wired.sddmm(style).run(run, arrays, (50, 50))
            measured[name] = result.cycles, np.array_equal(result.outputs["X"].to_dense(), expected)
        product = wired.sddmm("product").run(run, {k: arrays[k] for k in "CD"}, (50, 50))
        dense = product.outputs["X"].to_dense()
        last = wired.elementwise("mul").run(run, {"B": b, "C": dense}, (50, 50))
        both = product.cycles + last.cycles
        measured["unfused"] = both, np.array_equal(last.outputs["X"].to_dense(), expected)
        for name, (cycles, exact) in measured.items():
            wanted = paper.SDDMM[name][inner]
            row = {"variant": name, "K": inner, "cycles": cycles, "SAM in Python": wanted, "off": off(cycles, wanted)}
            rows.append({**row, "exact": bool(exact)})
    notes = (
        "Comal has no counts of these. Where locating or fibers of one element make runs short, SAM's simulator takes "
        "41 to 49 cycles more, whatever K is: nearly one a row.",
    )
    return Study("sddmm", "Sampled products", "SAM's Python simulator", tuple(rows), notes)
