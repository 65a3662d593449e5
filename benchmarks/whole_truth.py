"""Whole models: what the simulator says they take as PyTorch runs them, against ``whole_models.py --library``.

    python benchmarks/whole_truth.py            print the table; write results/whole_truth.json
    python benchmarks/whole_truth.py mgn        only cases whose names begin so

Nothing was fitted on these. Eager is a kernel an operator, Inductor's arm fuses what lies between products
(``studies/kitsune/pytorch.py``). Ours, of ``whole_models.py`` without ``--library``, are the pipelines of the regions
that are planned, simulated, and Inductor's kernels for operators that stand in other lines of the user's.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from truth import RESULTS, table

from tilestream import devices
from tilestream.apps.models import find
from tilestream.devices import Device
from tilestream.options import parse
from tilestream.plan.analyse import analyse
from tilestream.simulator import run, simulate
from tilestream.studies.kitsune.graphs import graph_of
from tilestream.studies.kitsune.pytorch import workload

OUT = RESULTS / "whole_truth.json"


@dataclass(frozen=True)
class Whole:
    """One model in one arm; microseconds."""

    case: str
    training: bool
    arm: str
    measured_us: float
    predicted_us: float

    @property
    def error(self) -> float:
        return self.predicted_us / self.measured_us - 1


def wholes(prefix: str = "") -> list[Whole]:
    """Every measured case, predicted."""
    device = devices.get("h200")
    made = []
    for path in sorted((RESULTS / "whole").glob(f"{prefix}*_library.json")):
        data = json.loads(path.read_text())
        graph = graph_of(data["model"], "training" if data["training"] else "inference", data["sizes"])
        for arm in ("eager", "inductor"):
            us = run(workload(graph, device, arm == "inductor"), device).time_s * 1e6
            name = path.stem.removesuffix("_library").removesuffix("_training")
            made.append(Whole(name, data["training"], arm, data["arms"][arm]["us"], us))
    for path in sorted((RESULTS / "whole").glob(f"{prefix}*.json")):
        data = json.loads(path.read_text())
        if "tilestream" in data.get("arms", ()) and data.get("training") is False:
            us = ours_us(data["model"], data["sizes"], device)
            made.append(Whole(path.stem, False, "tilestream", data["arms"]["tilestream"]["us"], us))
    return made


def ours_us(model: str, sizes: dict[str, Any], device: Device) -> float:
    """Inference: the pipelines of all regions that run as such, and what Inductor makes of the rest."""
    module, inputs = find(model).make(device="meta", **sizes)
    regions = analyse(module, inputs, parse({"device": device.name})).regions
    chosen = [(region, c.pipeline) for region in regions if (c := region.runs()) is not None and c.pipeline is not None]
    streamed = sum(simulate(pipeline, region.rows, device).time_us for region, pipeline in chosen)
    lines = {line for region, _ in chosen for line in region.sources}
    graph = graph_of(model, "inference", sizes)
    left = workload(graph, device, compiled=True)
    rest = 0.0
    for launch, timed in zip(left.launches, run(left, device).launches, strict=True):
        ops = [graph[name] for stage in launch.stages for name in stage.ops]
        rest += timed.seconds * 1e6 * sum(op.source not in lines for op in ops) / len(ops)
    return streamed + rest


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
    groups += [(arm, [w for w in found if w.arm == arm]) for arm in ("eager", "inductor", "tilestream")]
    groups += [(mode, [w for w in found if w.training == (mode == "training")]) for mode in ("inference", "training")]
    scores = []
    for name, part in groups:
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
