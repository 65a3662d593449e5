"""Predicted against measured: the simulator's times for the kernels that ``silicon.py`` timed on an H200.

    python benchmarks/truth.py             print the tables; write results/truth.json, docs/truth.png, docs/truth.md
    python benchmarks/truth.py --check     exit code 1 if docs/truth.md is not what the measurements say

PyTorch's kernels are predicted as the bulk baseline of the evaluation is (``tilestream.studies.kitsune.kernels``),
pipelines as ``tilestream.simulate`` does, from the IR that ran. Every second kernel of ``silicon.json`` is held out:
the constants were fitted (``fit_simulator.py``) on the others. All of ``silicon_held_out.json`` is, where that has
been measured.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import rankdata

from tilestream import devices
from tilestream.devices import Device
from tilestream.ir.serialise import pipeline_from_json
from tilestream.simulator import run, simulate
from tilestream.simulator.workload import SimStage, Workload
from tilestream.studies.kitsune import aten_table, kernels

HERE = Path(__file__).parent
RESULTS = HERE / "results"
DOC = HERE.parent / "docs" / "truth.md"
PICTURE = DOC.with_suffix(".png")
BEGIN, END = "<!-- truth: begin -->", "<!-- truth: end -->"
GROUPS = {
    "linear": "GEMM",
    "matmul": "GEMM",
    "bmm": "GEMM",
    "elementwise": "elementwise",
    "pipeline": "pipelines of ours",
}
OTHERS = "other kernels"
RESIDENT, LOST = 0.6, 1.0
"""Shares of the L2 up to which operands all stay in it from call to call, and from which none does."""


@dataclass(frozen=True)
class Point:
    """One kernel in one state; microseconds."""

    name: str
    group: str
    state: str
    held_out: bool
    measured_us: float
    predicted_us: float

    @property
    def error(self) -> float:
        return self.predicted_us / self.measured_us - 1


@dataclass(frozen=True)
class Score:
    """Of a set of points: mean absolute error and mean error, in percent, and Spearman's rank correlation."""

    group: str
    count: int
    mape: float
    bias: float
    rank: float

    @classmethod
    def of(cls, group: str, points: Sequence[Point]) -> Score:
        errors = np.array([p.error for p in points])
        ranks = rankdata([[p.measured_us for p in points], [p.predicted_us for p in points]], axis=1)
        rank = np.corrcoef(ranks)[0, 1]
        return cls(group, len(points), 100 * float(np.abs(errors).mean()), 100 * float(errors.mean()), float(rank))


def held_in_l2(size: float, device: Device) -> float:
    """Share of operands of ``size`` bytes that repeated calls find in the L2."""
    return min(1.0, max(0.0, (LOST - size / device.l2_bytes) / (LOST - RESIDENT)))


def predict_us(row: dict[str, Any], device: Device) -> float:
    """The simulator's microseconds for a row of ``silicon.py``."""
    if row["kind"] == "pipeline":
        pipelines = [pipeline_from_json(p) for p in row["extra"]["pipelines"]]
        return sum(simulate(p, row["shape"]["rows"], device).time_us for p in pipelines)
    cached = held_in_l2(row["bytes"], device) if row["state"] == "warm" else 0.0
    stage = stage_of(row, cached, device)
    return run(Workload(row["name"], (kernels.launch(row["name"], stage),)), device).time_s * 1e6


def stage_of(row: dict[str, Any], cached: float, device: Device) -> SimStage:
    shape, kind = row["shape"], row["kind"]
    if kind in ("linear", "matmul", "bmm"):
        return kernels.gemm(kind, shape.get("b", 1), shape["m"], shape["n"], shape["k"], "bf16", device, cached=cached)
    import torch

    name = str(shape.get("op", kind)).replace("relu_backward", "threshold_backward")
    counts = aten_table.row(getattr(torch.ops.aten, name, None))
    elements, read, written = _amounts(row)
    return kernels.stream(
        kind,
        elements,
        read,
        written,
        device,
        simt_ops=counts.simt * elements,
        sfu_ops=counts.sfu * elements,
        cached=cached,
    )


def _amounts(row: dict[str, Any]) -> tuple[float, float, float]:
    """Elements worked on, and bytes read and written."""
    shape, kind = row["shape"], row["kind"]
    if kind == "elementwise":
        n = shape["elements"]
        return n, 2.0 * n * shape["inputs"], 2.0 * n
    if kind == "reduction":
        n = shape["rows"] * shape["features"]
        results = {"sum_rows": shape["features"], "sum_features": shape["rows"]}.get(shape["op"], n)
        return n, 2.0 * n, 2.0 * results
    if kind == "gather":
        n = shape["edges"] * shape["features"]
        return n, 2.0 * shape["nodes"] * shape["features"] + 8 * shape["edges"], 2.0 * n
    if kind == "cat":
        n = shape["rows"] * (shape["a"] + shape["b"])
        return n, 2.0 * n, 2.0 * n
    n = row["bytes"] / 4
    return n, row["bytes"] / 2, row["bytes"] / 2


SKIPPED = {"launch", "sdpa", "scatter", "transpose"}
"""Kinds that the model has no kernel for: their time is set by latency, atomics or access patterns."""


def split(rows: Sequence[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows to fit on and rows held out: of each kind every second kernel, in both its states."""
    parts: tuple[list[dict[str, Any]], list[dict[str, Any]]] = [], []
    seen: dict[str, list[str]] = {}
    for row in rows:
        names = seen.setdefault(row["kind"], [])
        if row["name"] not in names:
            names.append(row["name"])
        parts[names.index(row["name"]) % 2].append(row)
    return parts


def points(rows: Sequence[dict[str, Any]], held_out: bool, device: Device) -> list[Point]:
    return [
        Point(row["name"], GROUPS.get(row["kind"], OTHERS), row["state"], held_out, row["us"], predict_us(row, device))
        for row in rows
        if row["kind"] not in SKIPPED
    ]


def measured(name: str) -> list[dict[str, Any]]:
    """Rows of a result file; none if it is not there."""
    path = RESULTS / name
    return json.loads(path.read_text())["rows"] if path.exists() else []


def scores(found: Iterable[Point]) -> list[Score]:
    """Of all claimed kernels, of each group, of the others."""
    found = list(found)
    claimed = [p for p in found if p.group != OTHERS]
    made = [Score.of("all of these", claimed)] if claimed else []
    for group in dict.fromkeys((*GROUPS.values(), OTHERS)):
        members = [p for p in found if p.group == group]
        if len(members) > 2:
            made.append(Score.of(group, members))
    return made


def table(headings: Sequence[str], rows: Iterable[Sequence[str]], left: int = 1) -> str:
    rule = ["---"] * left + ["---:"] * (len(headings) - left)
    return "\n".join("| " + " | ".join(line) + " |" for line in (headings, rule, *rows))


def score_table(made: Sequence[Score]) -> str:
    rows = [(s.group, str(s.count), f"{s.mape:.1f} %", f"{s.bias:+.1f} %", f"{s.rank:.3f}") for s in made]
    return table(("", "kernels", "mean absolute error", "mean error", "rank correlation"), rows)


def point_table(found: Sequence[Point]) -> str:
    rows = [(p.name, p.state, f"{p.measured_us:.1f}", f"{p.predicted_us:.1f}", f"{p.error:+.0%}") for p in found]
    return table(("kernel", "L2", "measured us", "predicted us", "error"), rows, left=2)


def document(fitted: Sequence[Point], held_out: Sequence[Point]) -> str:
    """What stands between the markers of docs/truth.md."""
    parts = ["### Held out", "", score_table(scores(held_out)), "", "### Fitted on", "", score_table(scores(fitted))]
    parts += ["", "### Every held-out kernel", "", point_table(held_out)]
    worst = sorted((p for p in fitted if p.group != OTHERS), key=lambda p: -abs(p.error))[:12]
    parts += ["", "### The twelve worst of the fitted ones", "", point_table(worst)]
    return "\n".join(parts)


def draw(found: Sequence[Point], path: Path) -> None:
    """Scatter plot, both axes logarithmic; held-out kernels filled, fitted ones pale."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(figsize=(6.4, 6.0))
    claimed = [p for p in found if p.group != OTHERS]
    for index, group in enumerate(dict.fromkeys(GROUPS.values())):
        for held_out in (False, True):
            part = [p for p in claimed if p.group == group and p.held_out == held_out]
            axes.scatter(
                [p.measured_us for p in part],
                [p.predicted_us for p in part],
                s=22,
                color=f"C{index}",
                alpha=0.9 if held_out else 0.25,
                linewidths=0,
                label=f"{group}, {'held out' if held_out else 'fitted'}",
            )
    low = min(min(p.measured_us, p.predicted_us) for p in claimed) / 1.3
    high = max(max(p.measured_us, p.predicted_us) for p in claimed) * 1.3
    axes.plot([low, high], [low, high], color="0.3", linewidth=1)
    for factor in (0.85, 1.15):
        axes.plot([low, high], [low * factor, high * factor], color="0.6", linewidth=0.7, linestyle="--")
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set(xlabel="measured on an H200, us", ylabel="simulated, us")
    axes.legend(fontsize=8, frameon=False)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    device = devices.get("h200")
    to_fit, kept = split(measured("silicon.json"))
    fitted = points(to_fit, False, device)
    held_out = points([*kept, *measured("silicon_held_out.json")], True, device)
    text = DOC.read_text()
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    made = f"{before}{BEGIN}\n\n{document(fitted, held_out)}\n\n{END}{after}"
    if given.check:
        if made != text:
            print("docs/truth.md is not what the measurements say: run benchmarks/truth.py", file=sys.stderr)
        return int(made != text)
    for title, part in (("held out", held_out), ("fitted", fitted)):
        print(f"{title}\n{score_table(scores(part))}\n")
    DOC.write_text(made)
    draw([*fitted, *held_out], PICTURE)
    result = {
        "device": device.name,
        "scores": {"held_out": [asdict(s) for s in scores(held_out)], "fitted": [asdict(s) for s in scores(fitted)]},
        "points": [asdict(p) for p in (*held_out, *fitted)],
    }
    (RESULTS / "truth.json").write_text(json.dumps(result, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
