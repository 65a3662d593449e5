"""Fits what ``kernels.coefficients.sums_by_index`` takes for sorts and atomics to ``benchmarks/results``, and says how
far off it is.

    python -m benchmarks.fit.fit_scatter_cost

From ``sorted_keys.json`` and ``scatter_costs.json`` (``benchmarks.run`` of the same names), uniform indices, int64, by
least squares of relative errors.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.optimize import nnls

from tilestream.kernels.coefficients import sums_by_index

RESULTS = Path(__file__).parent.parent / "results"


def cases(name: str) -> list[dict[str, Any]]:
    """Those of uniform indices."""
    found: list[dict[str, Any]] = json.loads((RESULTS / f"{name}.json").read_text())["cases"]
    return [case for case in found if case["kind"] == "uniform"]


def linear(rows: Sequence[tuple[Sequence[float], float]]) -> list[float]:
    """Non-negative factors of each row's numbers, whose sum is nearest to its time."""
    return nnls(np.array([[n / us for n in numbers] for numbers, us in rows]), np.ones(len(rows)))[0].tolist()


def sorts() -> tuple[list[float], list[float], float]:
    """Of one tile a fixed part and an edge's; of several, the same where the L2 holds them; an edge's where not."""
    rows = [(r["edges"], r["us"]["ours"]) for r in cases("sorted_keys") if r["nodes"] <= r["edges"]]
    few = linear([((1, n), us) for n, us in rows if n <= sums_by_index.TILE])
    many = linear([((1, n), us) for n, us in rows if sums_by_index.TILE < n <= 1_000_000])
    return few, many, linear([((n,), us) for n, us in rows if n >= 2_000_000])[0]


def atomics() -> dict[str, float]:
    """Microseconds of an element: of ``index_add``, which is torch's kernel everywhere; and as Inductor adds."""
    rows = [r for r in cases("scatter_costs") if r["features"] >= 64 and r["edges"] > 50_000]
    of = {
        "index_add": [(r, r["us"]["index_add"]) for r in rows],
        "inductor, 16 bits": [(r, r["us"]["inductor"]) for r in rows if "16" in r["dtype"] and "inductor" in r["us"]],
        "inductor, fp32": [(r, r["us"]["inductor"]) for r in rows if "32" in r["dtype"] and "inductor" in r["us"]],
    }
    return {name: linear([((r["edges"] * r["features"],), us) for r, us in made])[0] for name, made in of.items()}


def worst(rows: Sequence[tuple[float, float]]) -> float:
    """The largest relative error of (predicted, measured)."""
    return max(abs(predicted / us - 1) for predicted, us in rows)


def sort_errors() -> list[tuple[float, float]]:
    sparse = (r for r in cases("sorted_keys") if r["nodes"] <= r["edges"])
    return [(sums_by_index.sort(r["edges"]).us, r["us"]["ours"]) for r in sparse]


def main() -> None:
    few, many, large = sorts()
    print(f"TILE_US, TILE_EDGE_US = {few[0]:.1f}, {few[1]:.1e}")
    print(f"SORT_US, SORT_EDGE_US, DRAM_EDGE_US = {many[0]:.1f}, {many[1]:.1e}, {large:.1e}")
    print(f"  at most {worst(sort_errors()):.0%} off, as they stand")
    for name, us in atomics().items():
        print(f"{name}: {us:.1e} us an element")


if __name__ == "__main__":
    main()
