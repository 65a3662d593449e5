"""Fits ``kernels.coefficients.segments`` to measured kernels of segments, and says how far off it is on others.

    python -m benchmarks.fit.fit_segments               how far off it is as it stands, by set, by half and by kind
    python -m benchmarks.fit.fit_segments --fit         shares that fit the even kernels, and the errors with them

From ``ragged_kernels.json`` (``benchmarks.run.ragged_kernels``). Each half is of all sets that are there, the third one
aside, which nothing is fitted to. Graphs are drawn again on the CPU: other lists of the same kind. The shares as they
stand were fitted to times of former kernels, 65 of both sets (commit 95af344d). No GPU; minutes with ``--fit``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from math import exp, log

import torch

from benchmarks.lib.fresh_ragged import cases
from benchmarks.run.ragged_kernels import RESULT
from tilestream import devices
from tilestream.ir.lengths import Lengths, Sizes, sizes_of
from tilestream.kernels.families import kernel_of
from tilestream.kernels.segments import cost
from tilestream.kernels.segments.kernel import SegmentsKernel
from tilestream.simulator import launch, ragged

H200 = devices.get("h200")
FITTED = ("launch", "visit", "batch", "from_dram", "issued", "gathered")
UNSEEN = ("third",)
STIFF = 0.01
"""Weight of the square of how far a share moves, as a logarithm, from where it stands."""


@dataclass(frozen=True)
class Measured:
    """A kernel, its graph's sizes and lengths, and the microseconds that it took."""

    name: str
    of: str
    number: int
    graph: str
    kernel: SegmentsKernel
    size: Sizes
    us: float

    @property
    def lengths(self) -> Lengths:
        return self.size.lengths["edges"]

    def simulated_us(self) -> float:
        return launch.simulate(ragged.segments_launch(self.kernel, self.size, H200), H200, 1).seconds * 1e6

    def closed_us(self) -> float:
        """Of a graph at random of these sizes."""
        return self.kernel.cost(self.lengths.outer, H200, self.lengths.total).us


def measured() -> Iterator[Measured]:
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    for of, data in found.items():
        for number, (case, row) in enumerate(zip(cases(of), data["rows"], strict=True)):
            if "us" not in row:
                continue
            each = torch.bincount(case.index("cpu", number), minlength=case.nodes)
            lengths = Lengths.of(each.tolist())
            size = sizes_of(case.pipeline, {"nodes": case.nodes, "edges": case.edges}, {"edges": lengths})
            kernel = kernel_of(case.pipeline)
            assert isinstance(kernel, SegmentsKernel)
            yield Measured(case.name, of, number, case.graph, kernel, size, row["us"])


def errors(of: Sequence[Measured], how: Callable[[Measured], float]) -> list[float]:
    return [how(m) / m.us - 1 for m in of]


def told(name: str, off: Sequence[float]) -> str:
    mean, all_ = statistics.mean(off), statistics.mean(map(abs, off))
    return f"{name:36s} {len(off):3d}  mean absolute {all_:6.1%}  mean {mean:+6.1%}  worst {max(off, key=abs):+.0%}"


def fit(of: Sequence[Measured]) -> dict[str, float]:
    from scipy.optimize import minimize

    start = [log(getattr(cost.FITTED, name)) for name in FITTED]

    def off(point: Sequence[float]) -> float:
        cost.FITTED = replace(cost.FITTED, **{n: exp(x) for n, x in zip(FITTED, point, strict=True)})
        found = [log(m.simulated_us() / m.us) for m in of]
        moved = sum((x - s) ** 2 for x, s in zip(point, start, strict=True))
        return statistics.mean(map(abs, found)) + 0.5 * statistics.mean(x * x for x in found) + STIFF * moved

    simplex = [start] + [[x + 0.3 * (i == j) for j, x in enumerate(start)] for i in range(len(start))]
    found = minimize(off, start, method="Nelder-Mead", options={"maxfev": 120, "initial_simplex": simplex}).x
    off(found)
    return {n: round(exp(x), 3) for n, x in zip(FITTED, found, strict=True)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", action="store_true")
    given = parser.parse_args()
    every = list(measured())
    seen = [m for m in every if m.of not in UNSEEN]
    even, odd = ([m for m in seen if m.number % 2 == half] for half in (0, 1))
    if given.fit:
        print(fit(even))
    sets = {m.of: [other for other in every if other.of == m.of] for m in every}
    kinds = {m.name.split()[0]: [o for o in seen if o.name.split()[0] == m.name.split()[0]] for m in seen}
    graphs = {m.graph: [o for o in seen if o.graph == m.graph] for m in seen}
    for name, of in {"even": even, "odd": odd, **sets, **kinds, **graphs}.items():
        print(told(f"{name}, simulated", errors(of, Measured.simulated_us)))
        print(told(f"{name}, closed form", errors(of, Measured.closed_us)))


if __name__ == "__main__":
    main()
