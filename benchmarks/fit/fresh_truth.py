"""The fresh set: what the simulator says of kernels and whole models that nothing was fitted on or chosen by.

    python -m benchmarks.fit.fresh_truth  print the tables; write results/fresh_truth.json

Kernels and pipelines are those of ``results/silicon_fresh.json`` (``fresh_cases.py``), whole models those of
``results/fresh_models.json`` (``fresh_models.py``). ``truth.py`` puts the tables into docs/truth.md.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from benchmarks.fit.predicted_kernels import GEMMS, product_of
from benchmarks.fit.truth import GROUPS, OTHERS, Point, measured, points, score_table, scores
from benchmarks.fit.whole_truth import ARMS, Whole, summary, tables
from benchmarks.lib import fresh_models
from benchmarks.lib.places import RESULTS
from tilestream import devices
from tilestream.options import parse
from tilestream.plan.analyse import analyse
from tilestream.simulator import run
from tilestream.studies.kitsune.capture import capture
from tilestream.studies.kitsune.pytorch import workload

OUT = RESULTS / "fresh_truth.json"
KERNELS, MODELS = "silicon_fresh.json", "fresh_models.json"
ODD = "GEMM, odd widths"


def group_of(row: dict[str, Any]) -> str:
    if row["kind"] in GEMMS and product_of(row).aligned < 16:
        return ODD
    return GROUPS.get(row["kind"], OTHERS)


def kernels() -> list[Point]:
    return points(measured(KERNELS), False, devices.get("h200"), group_of)


def predicted(name: str, training: bool) -> dict[str, float]:
    """Microseconds of each arm, as every command predicts it without a GPU."""
    device = devices.get("h200")
    with FakeTensorMode(allow_non_fake_inputs=True):
        module, inputs = fresh_models.make(name, training)
    with torch.set_grad_enabled(training):
        made = analyse(module, inputs, parse({"device": "h200"}), training=training)
    eager = workload(capture(module, inputs, "training" if training else "inference"), device)
    us = (run(eager, device).time_s * 1e6, made.on_inductor.predicted_us, made.whole.predicted_us)
    return dict(zip(ARMS, us, strict=True))


def models() -> list[Whole]:
    found = []
    for row in json.loads((RESULTS / MODELS).read_text())["rows"]:
        us = predicted(row["model"], row["training"])
        arms = row["arms"]
        found += [Whole(row["model"], row["training"], arm, arms[arm]["us"], us[arm]) for arm in ARMS]
    return sorted(found, key=lambda w: ARMS.index(w.arm))


def main() -> int:
    found, whole = kernels(), models()
    print(score_table(scores(found)), tables(whole), sep="\n\n")
    data = {
        "device": "h200",
        "scores": [asdict(s) for s in scores(found)],
        "points": [asdict(p) for p in found],
        "summary": summary(whole),
        "models": [asdict(w) for w in whole],
        "tables": tables(whole),
    }
    OUT.write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
