"""Time every way to run a few models on the GPU that is there, beside what the cost model says of each.

    python -m benchmarks.run.candidates              all models, under two minutes on an H200
    python -m benchmarks.run.candidates --only norm  models whose name holds the word
    python -m benchmarks.run.candidates --dry-run    predictions alone; a small batch on the reference machine, no GPU
    python -m benchmarks.run.candidates --out FILE   instead of benchmarks/results/candidates.json

The planner times only what it thinks is best. Here each model runs in every legal combination of placement (a tile a
warpgroup, or one tile shared by columns), residency of the weights, and products in flight; and in Inductor. That is
what the constants of the cost model are to be judged by. bf16, random data; times are those of ``run.timer.Timer``:
medians over CUDA graph replays of all candidates in turn, results checked. The IR of each candidate is in the file, so
that a later cost model can be held against the same measurements.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.places import RESULTS
from benchmarks.lib.silicon_cases import model_of
from tilestream import devices
from tilestream.errors import IRError, TilestreamError, VerifyError
from tilestream.graph import capture, selection
from tilestream.graph.region import Region
from tilestream.ir.pipeline import Pipeline, Residency
from tilestream.ir.serialise import pipeline_to_json
from tilestream.options import Options
from tilestream.plan.candidates import Candidate, fallback_of
from tilestream.plan.cost import predict
from tilestream.plan.passes.cuts import cut_vertical
from tilestream.plan.passes.verified import apply
from tilestream.plan.planner import plan
from tilestream.plan.recipes import Recipe
from tilestream.run.call import RegionCall
from tilestream.run.made_up import random_arguments
from tilestream.run.spec import spec_of
from tilestream.run.target import Target
from tilestream.run.time_regions import region_trial
from tilestream.run.timer import Timer

BUDGET_S = 110.0
DRY_ROWS = 192

MODELS = (
    ("meshgraphnets", 262144),
    ("mlp 416-400-400-400-1 relu", 131072),
    ("residual 192-384-192 gelu", 114723),
    ("chain 4x512 relu", 65536),
    ("chain 4x192 silu", 131072),
    ("gated_ffn", 131072),
    ("chain 4x128 relu", 262144),
    ("chain 4x256 gelu", 131072),
    ("norm 256-512-256", 65536),
    ("policy_value", 65536),
)
"""Widths from 128 to 512, light and heavy epilogues, weights that fit and weights that do not. Most wanted first."""


@dataclass
class Row:
    """One candidate: microseconds predicted and measured, how far the prediction is off (0.1: 10 % too slow)."""

    model: str
    rows: int
    candidate: str
    predicted_us: float | None
    measured_us: float | None
    error: float | None
    failed: str
    pipeline: dict[str, Any] | None


def candidates(region: Region, device: devices.Device) -> list[Candidate]:
    """Every legal way to run ``region`` in vertical pipelines, each once, and the fallback."""
    found: list[Candidate] = []
    for dim, resident, in_flight in itertools.product((0, 1), (True, False), (2, 1)):
        recipe = Recipe("vertical", cut_vertical, dims=(dim,), resident=resident, in_flight=in_flight)
        try:
            pipeline = apply(recipe.passes(device), region.program)
        except (VerifyError, IRError):
            continue
        if all(c.pipeline != pipeline for c in found):
            us = predict(pipeline, region.rows, device).us
            found.append(Candidate(recipe.strategy, pipeline, us, detail=detail_of(pipeline)))
    others = plan(region.program, region.rows, device, Options()).candidates
    return [*found, fallback_of(others)]


def detail_of(pipeline: Pipeline) -> str:
    """What the stages are like; a recipe's wish is not always granted."""
    ways = [
        f"by {'columns' if s.placement.dim else 'rows'}, "
        + ("resident" if s.residency is Residency.RESIDENT else f"streamed, {s.in_flight} in flight")
        for s in pipeline.stages
    ]
    return "; ".join(ways)


def region_of(name: str, rows: int, device: str) -> Region:
    """The one region of a model.

    Raises:
        ValueError: the model has several, or none.
    """
    torch.compiler.reset()
    module, inputs = model_of(name, rows, device)
    found = [r for graph in capture.capture(module, inputs).graphs for r in selection.partition(graph).regions]
    if len(found) != 1:
        raise ValueError(f"{name} has {len(found)} regions")
    return found[0]


def row_of(name: str, region: Region, candidate: Candidate, found: float | Exception | None) -> Row:
    us = found if isinstance(found, float) else None
    guess = candidate.predicted_us
    return Row(
        name,
        region.rows,
        candidate.name,
        guess,
        us,
        guess / us - 1 if guess is not None and us else None,
        f"{type(found).__name__}: {found}" if isinstance(found, Exception) else "",
        None if candidate.pipeline is None else pipeline_to_json(candidate.pipeline),
    )


def timed(name: str, rows: int, device: devices.Device) -> list[Row]:
    """One model's candidates on the GPU."""
    region = region_of(name, rows, "cuda")
    found = candidates(region, device)
    target = Target("cuda", region.device, device)
    times = Timer(region_trial(region, target), target)(found)
    return [row_of(name, region, c, t) for c, t in zip(found, times, strict=True)]


def dry(name: str, rows: int, device: devices.Device) -> list[Row]:
    """One model's predictions; a few rows of each candidate through the reference machine, held against eager."""
    region = region_of(name, rows, "cpu")
    small = region_of(name, DRY_ROWS, "cpu")
    values = random_arguments(small)
    want = small.graph(*values)
    made = []
    for candidate in candidates(region, device):
        problem: Exception | None = None
        if candidate.pipeline is not None:
            call = RegionCall(spec_of(small, candidate.pipeline, "reference"), small.device)
            for ours, eager in zip(call.on_values(values), want, strict=True):
                error = float((ours.float() - eager.float()).norm() / eager.float().norm())
                if not error < 0.02:
                    problem = ArithmeticError(f"error against eager is {error:.2e}")
        made.append(row_of(name, region, candidate, problem))
    return made


def report(rows: Sequence[Row]) -> None:
    for r in rows:
        us = "" if r.measured_us is None else f"{r.measured_us:9.1f} us"
        guess = "" if r.predicted_us is None else f"{r.predicted_us:9.1f}"
        off = "" if r.error is None else f"{r.error:+7.0%}"
        print(f"{r.model:27s} {r.candidate:48s} {us:12s} {guess:9s} {off} {r.failed[:60]}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "candidates.json")
    parser.add_argument("--only", default="", help="models whose name holds this")
    parser.add_argument("--dry-run", action="store_true", help="no GPU: predictions, and the reference machine")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds; models left over are not measured")
    given = parser.parse_args()
    if not given.dry_run and not torch.cuda.is_available():
        print("no GPU: nothing to measure (--dry-run needs none)", file=sys.stderr)
        return 1
    device = devices.get("h200") if given.dry_run else devices.detect()
    if device is None:
        print("no description fits this GPU", file=sys.stderr)
        return 1
    started = time.perf_counter()
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for name, count in MODELS:
        if given.only not in name:
            continue
        if time.perf_counter() - started > given.budget:
            failed[name] = "not measured: out of time"
            continue
        try:
            found = (dry if given.dry_run else timed)(name, count, device)
        except (TilestreamError, RuntimeError, ValueError) as failure:  # one model must not cost the others
            failed[name] = f"{type(failure).__name__}: {failure}"
            print(f"{name:27s} failed: {failed[name][:200]}", flush=True)
            continue
        rows += found
        report(found)
    errors = [abs(r.error) for r in rows if r.error is not None]
    if errors:
        print(f"{len(errors)} times, mean error {sum(errors) / len(errors):.1%}, worst {max(errors):.0%}")
    data = {
        "schema": 1,
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "device": device.name,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "seconds": time.perf_counter() - started,
        "rows": [asdict(r) for r in rows],
        "failed": failed,
    }
    if not given.dry_run:
        given.out.parent.mkdir(parents=True, exist_ok=True)
        given.out.write_text(json.dumps(data, indent=1) + "\n")
    print(f"{len(rows)} candidates, {len(failed)} models failed, {data['seconds']:.0f} s")
    return 0 if rows and not failed and not any(r.failed for r in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
