"""Fit the simulator's constants to the half of ``silicon.json`` that is not held out, and print them.

    python benchmarks/fit_simulator.py            all three groups, about three minutes
    python benchmarks/fit_simulator.py gemm       one of: gemm, elementwise, steps

The values go by hand into ``tilestream/kitsune/kernels.py`` and ``tilestream/simulator/steps.py``. Steps are fitted on
the results of ``tilestream bench`` as well, of models that are not in ``silicon.json``.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
from scipy.optimize import minimize
from truth import RESULTS, measured, predict_us, split

from tilestream import devices
from tilestream.simulator import from_pipeline, steps
from tilestream.studies.kitsune import kernels

H200 = devices.get("h200")
MODELS = ("classifier", "graphcast", "policy_value", "sdf", "siren", "tabular_resnet")
CLIP = 0.4  # an error of more than this says that a kernel is of another sort, not that a constant is wrong

Setter = Callable[[np.ndarray], None]


def loss(rows: Sequence[dict[str, Any]], device: devices.Device = H200) -> float:
    """Root mean square logarithm of predicted over measured, clipped."""
    errors = [abs(np.log(predict_us(row, device) / row["us"])) for row in rows]
    return float(np.sqrt(np.mean(np.minimum(errors, CLIP) ** 2)))


def fit(names: Sequence[str], start: Sequence[float], put: Setter, rows: Sequence[dict[str, Any]], most: int) -> None:
    """Nelder and Mead on the logarithms of the constants; prints before, after and the values."""
    scale = np.array(start)

    def of(x: np.ndarray) -> float:
        put(scale * np.exp(x))
        return loss(rows)

    begin = of(np.zeros(len(scale)))
    simplex = np.vstack([np.zeros(len(scale)), 0.2 * np.eye(len(scale))])
    found = minimize(
        of, np.zeros(len(scale)), method="Nelder-Mead", options={"maxfev": most, "initial_simplex": simplex}
    )
    put(scale * np.exp(found.x))
    print(f"{len(rows)} rows: rms log error {begin:.3f} -> {found.fun:.3f}")
    for name, value in zip(names, scale * np.exp(found.x), strict=True):
        print(f"  {name} = {value:.4g}")


def gemm(rows: Sequence[dict[str, Any]]) -> None:
    names = ("GEMM_SHARE", "GEMM_LATENCY_S", "64x64", "128x64", "UNALIGNED_SHARE")

    def put(x: np.ndarray) -> None:
        kernels.GEMM_SHARE, kernels.GEMM_LATENCY_S = min(1.0, float(x[0])), float(x[1])
        kernels.GEMM_TILES[(64, 64)], kernels.GEMM_TILES[(128, 64)] = min(1.0, float(x[2])), min(1.0, float(x[3]))
        kernels.UNALIGNED_SHARE = min(1.0, float(x[4]))

    tiles = kernels.GEMM_TILES
    start = (kernels.GEMM_SHARE, kernels.GEMM_LATENCY_S, tiles[64, 64], tiles[128, 64], kernels.UNALIGNED_SHARE)
    fit(names, start, put, [r for r in rows if r["kind"] in ("linear", "matmul", "bmm")], 120)


def elementwise(rows: Sequence[dict[str, Any]]) -> None:
    names = ("GAP_S", "L2_LATENCY_S", "DRAM_LATENCY_S", "LANE_BASE", "LANE_SIMT", "LANE_SFU")

    def put(x: np.ndarray) -> None:
        for name, value in zip(names, x, strict=True):
            setattr(kernels, name, float(value))

    start = [getattr(kernels, name) for name in names]
    fit(names, start, put, [r for r in rows if r["kind"] == "elementwise"], 200)


def step_costs(rows: Sequence[dict[str, Any]]) -> None:
    names = [f.name for f in fields(steps.StepCosts)]

    def put(x: np.ndarray) -> None:
        costs = steps.StepCosts(*map(float, x))
        from_pipeline.H200_STEPS = costs
        steps.compute_s.__defaults__ = (costs,)

    start = [getattr(steps.H200_STEPS, name) for name in names]
    fit(names, start, put, [*(r for r in rows if r["kind"] == "pipeline"), *benched()], 160)


def benched() -> list[dict[str, Any]]:
    """Results of ``tilestream bench`` as rows of ``silicon.py``, with the pipelines that their plans name."""
    from tilestream.apps import APPS
    from tilestream.bench import replan
    from tilestream.ir.serialise import pipeline_to_json
    from tilestream.options import parse
    from tilestream.plan.analyse import analyse

    made = []
    for name in MODELS:
        result = json.loads((RESULTS / f"{name}.json").read_text())
        module, inputs = APPS[result["model"]].make(256)
        analysis = replan(analyse(module, inputs, parse({"device": "h200"})), H200, result["rows"])
        pipelines = []
        for region, ran in zip(analysis.regions, result["plan"]["regions"], strict=True):
            chosen = [c for c in region.plan.candidates if c.name == ran["chosen"]["name"]] if region.plan else []
            pipelines += [c.pipeline for c in chosen if c.pipeline is not None]
        if len(pipelines) == len(analysis.regions):
            made.append(
                {
                    "name": name,
                    "kind": "pipeline",
                    "state": "warm",
                    "shape": {"rows": result["rows"]},
                    "us": result["arms"]["tilestream"]["us"],
                    "extra": {"pipelines": [pipeline_to_json(p) for p in pipelines]},
                }
            )
    return made


def main() -> int:
    groups = {"gemm": gemm, "elementwise": elementwise, "steps": step_costs}
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
