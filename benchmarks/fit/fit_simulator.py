"""Fit the simulator's constants to the half of ``silicon.json`` that is no validation set, and print them.

    python -m benchmarks.fit.fit_simulator       all five groups, about three minutes
    python -m benchmarks.fit.fit_simulator gemm  one of: gemm, starts, elementwise, eager, indexed

The values go by hand into ``tilestream/simulator/library``. GEMMs of odd widths are fitted on the rows of
``silicon_widths.json`` that do not have 10,240 rows, eager's reductions, lookups and concatenations also on every
second kernel of ``silicon_others.json``. No error is clipped. Pipelines have no constants of the simulator's own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.optimize import minimize

from benchmarks.fit.predicted_kernels import GEMMS, SKIPPED, predict_us, product_of, rows_of
from benchmarks.fit.truth import measured, split, split_widths
from tilestream import devices
from tilestream.simulator.library import indexed as by_index
from tilestream.simulator.library import products as library
from tilestream.simulator.library import rows as row_kernels
from tilestream.simulator.library import stages, streams

H200 = devices.get("h200")
PRIOR = 0.004
"""Weight of the squared logarithm of a constant's change: what the data do not tell stays where it was."""

Setter = Callable[[np.ndarray], None]


def loss(rows: Sequence[dict[str, Any]], device: devices.Device = H200) -> float:
    """Mean absolute logarithm of predicted over measured."""
    return float(np.mean([abs(np.log(predict_us(row, device) / row["us"])) for row in rows]))


def fit(names: Sequence[str], start: Sequence[float], put: Setter, rows: Sequence[dict[str, Any]], most: int) -> None:
    """Nelder and Mead on the logarithms of the constants; prints before, after and the values."""
    scale = np.array(start)

    def of(x: np.ndarray) -> float:
        put(scale * np.exp(x))
        return loss(rows) + PRIOR * float(np.sum(x * x))

    begin = of(np.zeros(len(scale)))
    simplex = np.vstack([np.zeros(len(scale)), 0.2 * np.eye(len(scale))])
    found = minimize(
        of, np.zeros(len(scale)), method="Nelder-Mead", options={"maxfev": most, "initial_simplex": simplex}
    )
    put(scale * np.exp(found.x))
    print(f"{len(rows)} rows: mean log error {begin:.3f} -> {found.fun:.3f}")
    for name, value in zip(names, scale * np.exp(found.x), strict=True):
        print(f"  {name} = {value:.4g}")


def gemm(rows: Sequence[dict[str, Any]]) -> None:
    """Kernels of whole lines, then those of four and eight bytes, then those of single elements."""

    def put(x: np.ndarray) -> None:
        library.LINES = replace(library.LINES, latency_s=float(x[0]))
        library.SMALL, library.REDUCE_S, library.APART = map(float, x[1:])
        renew()

    names = ("LINES.latency_s", "SMALL", "REDUCE_S", "APART")
    start = (library.LINES.latency_s, library.SMALL, library.REDUCE_S, library.APART)
    odd, _ = split_widths(measured("silicon_widths.json"))
    odd += [r for r in rows if r["kind"] in GEMMS]
    fit(names, start, put, [r for r in odd if aligned(r) >= 16], 120)
    for name, low, high in (("WORDS", 4, 16), ("SINGLES", 2, 4)):
        fields = ("latency_s", "store", "copies", "odd_store")[: 4 if name == "SINGLES" else 3]

        def set_family(x: np.ndarray, name: str = name, fields: Sequence[str] = fields) -> None:
            told = dict(zip(fields, map(float, x), strict=True))
            setattr(library, name, replace(getattr(library, name), **told))
            renew()

        start = [getattr(getattr(library, name), field) for field in fields]
        fit([f"{name}.{f}" for f in fields], start, set_family, [r for r in odd if low <= aligned(r) < high], 120)


def renew() -> None:
    """Forget the tilings that were found with other constants."""
    library.FAMILIES = (library.LINES, library.WORDS, library.SINGLES)
    library.tiling.cache_clear()


def aligned(row: dict[str, Any]) -> int:
    return product_of(row).aligned


def starts(rows: Sequence[dict[str, Any]]) -> None:
    """The ways from one kernel to the next."""
    _elementwise(rows, [(stages, n) for n in ("GAP", "FROM_L2", "FROM_DRAM")])


def elementwise(rows: Sequence[dict[str, Any]]) -> None:
    """What an element issues: again whenever the counts of instructions change."""
    _elementwise(rows, [(streams, n) for n in ("LANE_BASE", "LANE_SFU")])


def _elementwise(rows: Sequence[dict[str, Any]], places: Sequence[tuple[Any, str]]) -> None:

    def put(x: np.ndarray) -> None:
        for (module, name), value in zip(places, x, strict=True):
            setattr(module, name, float(value))

    start = [getattr(module, name) for module, name in places]
    fit([n for _, n in places], start, put, [r for r in rows if r["kind"] == "elementwise"], 200)


def eager_rows(rows: Sequence[dict[str, Any]]) -> None:
    """Each kind of eager's kernels by itself: the fields that it has."""
    more, _ = split([*measured("silicon_others.json"), *measured("silicon_backward.json")])
    found = [(kind, r) for r in (*rows, *more) for kind in [kind_of(r)] if kind in row_kernels.EAGER]
    for kind in dict.fromkeys(kind for kind, _ in found):
        cost = row_kernels.EAGER[kind]
        fields = [f for f in ("row", "element", "wide", "serial", "start_s") if getattr(cost, f)]

        def put(x: np.ndarray, kind: str = kind, fields: Sequence[str] = fields) -> None:
            row_kernels.EAGER[kind] = replace(row_kernels.EAGER[kind], **dict(zip(fields, map(float, x), strict=True)))

        start = [getattr(cost, f) for f in fields]
        fit([f"{kind}.{f}" for f in fields], start, put, [r for of, r in found if of == kind], 80)


def indexed(_: Sequence[dict[str, Any]]) -> None:
    """Rows by an index: Inductor's atomics and gathers, then PyTorch's own."""
    rows, _ = split(measured("silicon_indexed.json"))
    names = ("ATOMIC_LINE", "ATOMIC_BYTE", "SINGLE", "SWAPPED", "AGAIN", "HELD", "SAME_S")

    def put(x: np.ndarray) -> None:
        for name, value in zip(names, map(float, x), strict=True):
            setattr(by_index, name, value)

    start = [getattr(by_index, name) for name in names]
    fit(names, start, put, [r for r in rows if not r["shape"]["op"].endswith("eager")], 260)
    for kind, op in (("scatter_elements", "scatter_add eager"), ("scatter_reduce", "amax eager")):

        def set_own(x: np.ndarray, kind: str = kind) -> None:
            row_kernels.EAGER[kind] = replace(row_kernels.EAGER[kind], element=float(x[0]))

        start = [row_kernels.EAGER[kind].element]
        fit([f"{kind}.element"], start, set_own, [r for r in rows if r["shape"]["op"] == op], 40)


def kind_of(row: dict[str, Any]) -> str:
    """The entry of ``EAGER`` that decides a row's time; empty where none does."""
    if row["kind"] in (*GEMMS, *SKIPPED):
        return ""
    op = row["shape"].get("op")
    if op == "layer_norm_backward":
        return "norm_sums"
    if op == "embedding_backward":
        return "table_gradient" if row["shape"]["edges"] <= row_kernels.SORTED else "table_gradient sorted"
    found = rows_of(row)
    return found[0] if found else ""


def main() -> int:
    groups = {"gemm": gemm, "starts": starts, "elementwise": elementwise, "eager": eager_rows, "indexed": indexed}
    wanted = sys.argv[1:] or list(groups)
    unknown = [name for name in wanted if name not in groups]
    if unknown:
        print(f"unknown group {unknown[0]!r}: use {', '.join(groups)}", file=sys.stderr)
        return 2
    rows, _ = split(measured("silicon.json"))
    for name in wanted:
        groups[name](rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
