"""Gated feed-forward blocks at 1 to 8,192 rows: where one kernel for the block stops paying.

    python -m benchmarks.run.gated_ffn --predict   the cost model's answer, no GPU; the plot of docs/few-rows-results.md
    python -m benchmarks.run.gated_ffn --seconds 540  measured too, the telling numbers of rows first, until time is up
    python -m benchmarks.run.gated_ffn --no-predict  measured alone, kept case by case
    python -m benchmarks.run.gated_ffn --plot      the plot alone, from the last result

``shared`` is one tile over the grid (docs/few-rows.md), the ``--splits`` best by prediction; beyond 512 rows it is
several launches, which the planner never takes: they show what it is right to leave. Others are eager, Inductor and
max-autotune, timed as ``few_rows.py`` does.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.lib.budget import Budget
from benchmarks.lib.few_rows_workloads import Workload
from benchmarks.lib.places import DOCS, RESULTS
from benchmarks.run.few_rows import Row, Wanted, program, workload
from tilestream import devices
from tilestream.bench.environment import environment
from tilestream.devices import Device
from tilestream.kernels.product.block import MOST_ROWS
from tilestream.options import Options
from tilestream.plan import few_rows, planner
from tilestream.plan.cost import predict
from tilestream.plan.passes.share_tile import Split, share_tile

RESULT = RESULTS / "gated_ffn_rows.json"
PICTURE = DOCS / "gated-ffn.png"
WORKLOADS = {
    "qwen3-0.6b": Workload(3072, 1024, 1024, True),
    "S2": Workload(5632, 2048, 2048, True),
    "llama-3.2-1b": Workload(8192, 2048, 2048, True),
}
ROWS = (128, 1, 512, 1024, 16, 256, 4096, 64, 2048, 8192, 32, 8)
"""Those first that say most of where the curves cross."""
GUESS_S = {"plain": 12.0, "tuned": 90.0}
"""Until one case, without and with max-autotune, was timed."""


@dataclass(frozen=True)
class Predicted:
    """A block at some rows: microseconds of the best shared tile, what it is, and of library kernels."""

    workload: str
    rows: int
    shared_us: float
    split: str
    library_us: float

    @property
    def gain(self) -> float:
        return self.library_us / self.shared_us


def best_splits(w: Workload, rows: int, device: Device, count: int) -> list[tuple[float, Split]]:
    """The ``count`` best splits and their predicted microseconds; those of fewer rows, in several launches, where no
    tiles of so many fit side by side."""
    block = program(w)
    for most in (MOST_ROWS, MOST_ROWS // 2, MOST_ROWS // 4):
        wanted = few_rows.best_splits(block, min(rows, most), device, Options())
        if wanted:
            timed = [(predict(share_tile(block, split, device), rows, device).us, split) for split in wanted]
            return sorted(timed, key=lambda each: each[0])[:count]
    return []


def predicted(name: str, rows: int, device: Device) -> Predicted | None:
    """None where no shared tile fits."""
    w = WORKLOADS[name]
    best = best_splits(w, rows, device, 1)
    fallback = planner.proposals(program(w), rows, device, Options(strategy="bulk"))[-1]
    if not best or fallback.predicted_us is None:
        return None
    ((us, split),) = best
    return Predicted(name, rows, us, str(split), fallback.predicted_us)


def measured(
    names: Sequence[str], rows: Sequence[int], splits: int, tuned: Sequence[int], budget: Budget
) -> Iterator[list[Row]]:
    """Cases in the order of ``rows``, as many as end in time."""
    for count in rows:
        for name in names:
            kind = "tuned" if count in tuned and budget.affords("tuned", GUESS_S["tuned"]) else "plain"
            if not budget.affords(kind, GUESS_S[kind]):
                print(f"{name}, {count} rows: left out, {budget.left_s:.0f} s are left", flush=True)
                continue
            w = WORKLOADS[name]
            best = [split for _, split in best_splits(w, count, devices.get("h200"), splits)]
            with budget.step(kind):
                made = workload(name, w, count, Wanted(tuned=kind == "tuned"), best)
            yield made


def gains(rows: Sequence[Row]) -> dict[str, list[tuple[int, float]]]:
    """By workload: rows, and what the best of the others takes over the best shared tile, weights from DRAM."""
    found: dict[str, list[tuple[int, float]]] = {}
    for name, count in sorted({(r.workload, r.rows) for r in rows}):
        here = [r for r in rows if (r.workload, r.rows) == (name, count)]
        ours = [r.cold_us for r in here if r.arm.startswith("shared")]
        others = [r.cold_us for r in here if not r.arm.startswith("shared")]
        if ours and others:
            found.setdefault(name, []).append((count, min(others) / min(ours)))
    return found


def plot(data: dict[str, Any], to: Path) -> None:
    """Gains by rows: lines are measured, dashes predicted."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), layout="constrained")
    timed = gains([Row(**r) for r in data["rows"]])
    foreseen = [Predicted(**p) for p in data["predicted"]]
    for number, name in enumerate(WORKLOADS):
        w, colour = WORKLOADS[name], f"C{number}"
        points = sorted((p.rows, p.gain) for p in foreseen if p.workload == name)
        label = f"{name}: {w.k}-{w.hid}-{w.out}"
        for kind, style, found in (("predicted", "--", points), ("measured", "o-", timed.get(name, []))):
            if found:
                axes.plot(*zip(*found, strict=True), style, color=colour, label=f"{label}, {kind}")
    axes.axhline(1.0, color="0.6", linewidth=0.8)
    axes.axvline(MOST_ROWS, color="0.8", linewidth=0.8)
    axes.set_xscale("log", base=2)
    axes.set(xlabel="rows (beyond the grey line: several launches)", ylabel="best other / one kernel")
    axes.legend(fontsize=8)
    figure.savefig(to, dpi=110, metadata={"Software": None})
    pyplot.close(figure)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--tuned", type=int, nargs="*", default=[1, 128, 512, 1024], help="rows with max-autotune too")
    parser.add_argument("--splits", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=540.0)
    parser.add_argument("--predict", action="store_true", help="nothing is measured: no GPU")
    parser.add_argument("--no-predict", action="store_true", help="predictions of the last result are kept")
    parser.add_argument("--plot", action="store_true", help="from the last result")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    given = parser.parse_args(words)
    names = given.names or list(WORKLOADS)
    data: dict[str, Any] = {"rows": [], "predicted": []}
    if given.out.exists():
        data = json.loads(given.out.read_text(encoding="utf-8"))
    if not given.plot and not given.no_predict:
        device = devices.get("h200")
        made = [p for n in names for r in sorted(given.rows) if (p := predicted(n, r, device)) is not None]
        again = {(p.workload, p.rows) for p in made}
        data["predicted"] = [p for p in data["predicted"] if (p["workload"], p["rows"]) not in again]
        data["predicted"] += [asdict(p) for p in made]
        for p in made:
            print(f"{p.workload:14} {p.rows:5} rows  {p.shared_us:8.1f}  {p.library_us:8.1f}  x{p.gain:.2f}  {p.split}")
    if not given.plot and not given.predict:
        for timed in measured(names, given.rows, given.splits, given.tuned, Budget(given.seconds)):
            again = {(r.workload, r.rows) for r in timed}
            data["rows"] = [r for r in data["rows"] if (r["workload"], r["rows"]) not in again]
            data["rows"] += [asdict(r) for r in timed]
            data["environment"] = environment()
            given.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    given.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    plot(data, given.picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
