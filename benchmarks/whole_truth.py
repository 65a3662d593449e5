"""Whole models: what the simulator says they take as PyTorch runs them, against ``whole_models.py --library``.

    python benchmarks/whole_truth.py            print the table; write results/whole_truth.json
    python benchmarks/whole_truth.py mgn        only cases whose names begin so

Nothing was fitted on these. Inductor's arm and ours, of ``whole_models.py`` without ``--library``, are what every
command shows: the plan of the whole (``plan/whole.py``), with its regions on Inductor or as pipelines. Eager is a
kernel an operator (``studies/kitsune/pytorch.py``).
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from predicted import Predicted
from truth import RESULTS, table

from tilestream import devices
from tilestream.apps.load import load
from tilestream.options import parse
from tilestream.plan.analyse import analyse
from tilestream.plan.analysis import Analysis
from tilestream.simulator import run
from tilestream.studies.kitsune.graphs import graph_of
from tilestream.studies.kitsune.pytorch import workload

OUT = RESULTS / "whole_truth.json"
ARMS = ("eager", "inductor", "tilestream")
OUTDATED = {("nerf_65536", True)}
"""Case and whether it is a training step. In our arm it was timed before weight gradients were stationary sums: another
program than the one that is predicted. Left out until timed again (``training.json`` has the step of today, with its
optimizer)."""


@dataclass(frozen=True)
class Whole(Predicted):
    """One model in one arm; microseconds."""

    case: str
    training: bool
    arm: str
    measured_us: float
    predicted_us: float


def wholes(prefix: str = "") -> list[Whole]:
    """Every measured case, predicted."""
    device = devices.get("h200")
    made = []
    for path in sorted((RESULTS / "whole").glob(f"{prefix}*.json")):
        data = json.loads(path.read_text())
        if "arms" not in data or "model" not in data or "training" not in data:
            continue
        name, training = path.stem.removesuffix("_library").removesuffix("_training"), data["training"]
        if path.stem.endswith("_library"):
            graph = graph_of(data["model"], "training" if training else "inference", data["sizes"])
            us = run(workload(graph, device), device).time_s * 1e6
            made.append(Whole(name, training, "eager", data["arms"]["eager"]["us"], us))
        arm = "inductor" if path.stem.endswith("_library") else "tilestream"
        if arm == "tilestream" and (name, training) in OUTDATED:
            continue
        if data["arms"].get(arm, {}).get("us"):
            plan = analysed(data["model"], data["sizes"], training)
            us = plan.on_inductor.predicted_us if arm == "inductor" else plan.whole.predicted_us
            made.append(Whole(name, training, arm, data["arms"][arm]["us"], us))
    return sorted(made, key=lambda w: ARMS.index(w.arm))


@cache
def _analysed(model: str, sizes: str, training: bool) -> Analysis:
    made = load(model, fake=True, sizes=json.loads(sizes), training=training)
    with torch.set_grad_enabled(training):
        return analyse(made.module, made.inputs, parse({"device": "h200"}), training=training)


def analysed(model: str, sizes: dict[str, Any], training: bool) -> Analysis:
    """The model as every command plans it."""
    return _analysed(model, json.dumps(sizes), training)


def summary(found: list[Whole]) -> dict[str, float]:
    errors = np.array([w.error for w in found])
    return {
        "count": len(found),
        "mape": 100 * float(np.abs(errors).mean()),
        "bias": 100 * float(errors.mean()),
        "worst": 100 * float(np.abs(errors).max()),
    }


def tables(found: list[Whole]) -> str:
    """Scores by arm and mode, then every case."""
    groups = [("all", found)]
    groups += [(arm, [w for w in found if w.arm == arm]) for arm in ARMS]
    groups += [(mode, [w for w in found if w.training == (mode == "training")]) for mode in ("inference", "training")]
    scores = []
    for name, part in groups:
        if not part:
            continue
        s = summary(part)
        scores.append((name, f"{s['count']:.0f}", f"{s['mape']:.1f} %", f"{s['bias']:+.1f} %", f"{s['worst']:.0f} %"))
    rows = [
        (
            w.case,
            "training" if w.training else "inference",
            w.arm,
            f"{w.measured_us:,.0f}",
            f"{w.predicted_us:,.0f}",
            f"{w.error:+.0%}",
        )
        for w in found
    ]
    return "\n\n".join(
        (
            table(("", "runs", "mean absolute error", "mean error", "worst"), scores),
            table(("model", "", "", "measured us", "predicted us", "error"), rows, left=3),
        )
    )


def main() -> int:
    found = wholes(*sys.argv[1:2])
    print(tables(found))
    if len(sys.argv) == 1:
        data = {
            "device": "h200",
            "summary": summary(found),
            "rows": [asdict(w) for w in found],
            "tables": tables(found),
        }
        Path(OUT).write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
