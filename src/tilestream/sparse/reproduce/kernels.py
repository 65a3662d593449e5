"""The hand-wired kernels beside the cycle counts of two reference simulators (section 6 of the notes)."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from tilestream.sparse import engine
from tilestream.sparse import kernels as wired
from tilestream.sparse.kernels import Kernel, hashed
from tilestream.sparse.reproduce import paper
from tilestream.sparse.reproduce.study import Options, Study, off
from tilestream.sparse.storage import SparseTensor
from tilestream.sparse.stream.result import Result
from tilestream.sparse.timing import COMAL, SAM, Timing


def _make(name: str) -> Kernel:
    kind, *rest = name.split()
    if kind == "elemmul" or kind == "elemadd":
        return wired.elementwise(kind[4:])
    if name == "matmul ikj dense":
        return wired.matmul_dense()
    if kind == "chain":
        return wired.chain() if rest == ["ikjl"] else wired.matmul("ikj")
    if rest[1:] == ["x2"]:
        return wired.matmul_parallel(2)
    return wired.matmul(rest[0])


def _arrays(name: str, n: int, d: int) -> tuple[dict[str, np.ndarray], np.ndarray]:
    """Operands and the expected result."""
    b, c, w = (hashed(n, d, seed) for seed in (1, 2, 3))
    if name.endswith("diagonal"):
        b = c = np.diag(np.arange(1.0, n + 1))
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
        as_sam = kernel.run(run, arrays, expected.shape, timing=SAM).cycles if case.sam else None
        rows.append(
            {
                "kernel": case.name,
                "n": case.n,
                "d": case.d,
                "cycles": result.cycles,
                "Comal": case.comal,
                "off": off(result.cycles, case.comal),
                "as SAM times": as_sam,
                "SAM in Python": case.sam,
                "off SAM": off(as_sam, case.sam) if as_sam else None,
                "values written": made.nnz,
                "reference values": case.values,
                "sum": float(made.values.sum()),
                "reference sum": case.total,
                "exact": bool(np.array_equal(made.to_dense(), expected)),
            }
        )
    notes = (
        "As SAM times: with its reductions and accumulators (`timing=SAM`). Its accumulator of two levels takes "
        "points, which have no stops of the outer level: by Comal's timing the orders that begin with k take a cycle "
        "more for each k, which is 42 at n = 50 and d = 20, and 23.7 % on the diagonal matrices.",
    )
    source = "reference counts of Comal's nodes and of SAM's Python simulator"
    return Study("kernels", "Kernels", source, tuple(rows), notes)


def _sampled(
    run: Callable[..., Result], arrays: dict[str, np.ndarray], expected: np.ndarray, timing: Timing
) -> dict[str, tuple[int, bool]]:
    """(cycles, whether the values are exact) of the three variants."""
    made = {
        name: wired.sddmm(style).run(run, arrays, expected.shape, timing=timing)
        for name, style in (("co-iteration fused", "coiterate"), ("locate fused", "locate"))
    }
    product = wired.sddmm("product").run(run, {k: arrays[k] for k in "CD"}, expected.shape, timing=timing)
    operands = {"B": arrays["B"], "C": product.outputs["X"].to_dense()}
    last = wired.elementwise("mul").run(run, operands, expected.shape, timing=timing)
    cycles = {name: result.cycles for name, result in made.items()} | {"unfused": product.cycles + last.cycles}
    return {
        name: (cycles[name], bool(np.array_equal(result.outputs["X"].to_dense(), expected)))
        for name, result in {**made, "unfused": last}.items()
    }


def sddmm(options: Options, run: Callable[..., Result] = engine.run) -> Study:
    """``X = B * (C D)`` where B asks: co-iterating, locating, and as two kernels."""
    rows = []
    b = hashed(50, 20, 1)
    for inner in (1, 10, 100):
        arrays = {"B": b, "C": np.ones((50, inner)), "D": np.ones((inner, 50))}
        expected = b * (arrays["C"] @ arrays["D"])
        comal, sam = (_sampled(run, arrays, expected, timing) for timing in (COMAL, SAM))
        for name, (cycles, exact) in comal.items():
            as_sam, wanted = sam[name][0], paper.SDDMM[name][inner]
            row = {"variant": name, "K": inner, "cycles": cycles, "as SAM times": as_sam, "SAM in Python": wanted}
            rows.append({**row, "off SAM": off(as_sam, wanted), "exact": exact and sam[name][1]})
    notes = (
        "Comal has no counts of these. As SAM times: the stop after a sum leaves a cycle after the sum, which is a "
        "cycle a row. What is left is at most 4 cycles, whatever K is: the depth of the pipelines.",
    )
    return Study("sddmm", "Sampled products", "SAM's Python simulator", tuple(rows), notes)
