"""Time kernels of segments that were drawn by a seed beside what the simulator says of them.

    python -m benchmarks.run.ragged_kernels                     on an H200: values, times, predictions of the third set
    python -m benchmarks.run.ragged_kernels --set validation    of one whose even kernels shares were fitted on; fresh
    python -m benchmarks.run.ragged_kernels --predict           predictions alone, without a GPU

The kernels are those of ``benchmarks/lib/fresh_ragged.py``. The simulator is told the lengths of the drawn graph, as
``explain`` is of a user's. Each kernel runs on poisoned results first, twice, for the same bits, and is held against
float64. Times are medians of CUDA graphs of its launches alone: the list is sorted before. Results go to
``benchmarks/results/ragged_kernels.json``.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from typing import Any

import torch

from benchmarks.lib.fresh_ragged import SEEDS, RaggedCase, cases
from benchmarks.lib.places import RESULTS
from tilestream import devices
from tilestream.bench.environment import environment
from tilestream.ir.pipeline import Role
from tilestream.kernels.families import kernel_of
from tilestream.run import oracle, timing
from tilestream.run.device_ops import segments
from tilestream.run.executable import build_ahead, executable
from tilestream.simulator import simulate

RESULT = RESULTS / "ragged_kernels.json"
TOLERANCE = {"bf16": 2.0**-7, "f16": 2.0**-10, "f32": 2.0**-18}
"""Of a result that is rounded once, against float64, all elements as one vector."""


def predicted_us(case: RaggedCase, starts: torch.Tensor) -> float:
    """By the simulator, on an H200, of these bounds."""
    lengths = {"edges": case.lengths(starts)}
    sizes = {"nodes": case.nodes, "edges": case.edges}
    return simulate(case.pipeline, sizes, devices.get("h200"), spans=False, lengths=lengths).time_us


def measured(case: RaggedCase, seed: int) -> dict[str, Any]:
    """Values and times of one kernel on the GPU."""
    receivers = case.index("cuda", seed)
    order, starts, busy = segments(receivers, case.nodes)
    given = case.tensors("cuda", order, receivers, seed)
    outputs = case.pipeline.by_role(Role.OUTPUT)
    names = tuple(t.name for t in outputs)
    shapes = [(case.nodes, *(a.size or 0 for a in t.axes[1:])) for t in outputs]
    results = [torch.empty(s, dtype=next(iter(given[n] for n in case.widths)).dtype, device="cuda") for s in shapes]
    fixed = {**given, "starts": starts, "starts.busy": busy}
    bound = executable(case.pipeline, "cuda", receivers.device).bind(fixed, case.nodes, names)

    def poisoned() -> list[torch.Tensor]:
        for y in results:
            y.fill_(float("nan"))
        bound(results)
        return [y.clone() for y in results]

    first, second = poisoned(), poisoned()
    wide = {n: t.double() if t.is_floating_point() else t.long() for n, t in given.items()}
    exact = case.exact({**wide, "receivers": receivers[order.long()], "nodes": starts[:-1]})
    error = max(oracle.error(y, exact[n]) for n, y in zip(names, first, strict=True))
    del wide, exact
    samples = timing.interleaved([timing.capture(lambda: bound(results))], timing.ROUNDS)[0]
    return {
        "us": statistics.median(samples),
        "predicted_us": predicted_us(case, starts.cpu()),
        "error": error,
        "right": error <= TOLERANCE[case.dtype],
        "same_bits": all(torch.equal(a, b) for a, b in zip(first, second, strict=True)),
        "largest": int(starts.diff().max()),
    }


def counted(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Those that were timed and are what they were meant to be."""
    return [r for r in rows if r.get("us")]


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean absolute and mean error of the predictions, and the worst."""
    off = [r["predicted_us"] / r["us"] - 1 for r in counted(rows)]
    return {
        "kernels": len(off),
        "mean_absolute": statistics.mean(map(abs, off)),
        "mean": statistics.mean(off),
        "worst": max(off, key=abs),
        "right": sum(r.get("right", False) and r.get("same_bits", False) for r in rows),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", choices=sorted(SEEDS), default="third")
    parser.add_argument("--predict", action="store_true", help="no GPU")
    given = parser.parse_args()
    every = cases(given.set)
    if given.predict:
        for number, case in enumerate(every):
            refused = kernel_of(case.pipeline).refusal
            starts = torch.zeros(case.nodes + 1, dtype=torch.long)
            starts[1:] = torch.bincount(case.index("cpu", number), minlength=case.nodes).cumsum(0)
            print(case.name, refused or f"{predicted_us(case, starts):.1f} us")
        return
    build_ahead([c.pipeline for c in every], "cuda")
    rows: list[dict[str, Any]] = []
    for number, case in enumerate(every):
        row: dict[str, Any] = {"kernel": case.name, "graph": case.graph}
        try:
            row |= measured(case, number)
            print(f"{case.name}: {row['us']:.1f} us, predicted {row['predicted_us']:.1f}, error {row['error']:.1e}")
        except Exception as failure:
            row["failed"] = f"{type(failure).__name__}: {failure}"[:300]
            print(f"{case.name}: {row['failed']}")
        rows.append(row)
        torch.cuda.empty_cache()
    data = {"environment": environment(), "summary": summary(rows), "rows": rows}
    print(json.dumps(data["summary"]))
    kept = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
    RESULT.write_text(json.dumps({**kept, given.set: data}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
