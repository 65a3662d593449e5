"""Where a pipeline over SMs is the faster plan: vertical, spatial by layers, spatial by columns, and Inductor.

    python -m benchmarks.run.spatial_wins           every case, most telling first, within --seconds (110)
    python -m benchmarks.run.spatial_wins --only 512  cases whose name holds the word
    python -m benchmarks.run.spatial_wins --dry-run  predicts and compiles everything; needs no GPU
    python -m benchmarks.run.spatial_wins --sweep   predictions by depth, width and rows beside each other; needs no GPU
    python -m benchmarks.run.spatial_wins --out FILE  instead of benchmarks/results/spatial_wins.json

Candidates are those of ``options={"strategy": "vertical"}`` and of ``"spatial"``, the best few of each kind by
prediction, all timed side by side: CUDA graphs, medians over rounds that take them in turn, results checked against
float64 (``run.timer``). ``docs/when-dataflow-helps.md`` has the table that is made of it.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.places import RESULTS
from benchmarks.run.candidates import region_of
from tilestream import cuda, devices
from tilestream.bench.environment import environment
from tilestream.errors import TilestreamError
from tilestream.graph.region import Region
from tilestream.options import Options
from tilestream.plan.candidates import Candidate
from tilestream.plan.planner import plan, proposals
from tilestream.run.target import Target
from tilestream.run.time_regions import region_trial
from tilestream.run.timer import Timer

OUT = RESULTS / "spatial_wins.json"
BUDGET_S = 110.0
KINDS = {"vertical": 2, "spatial by layers": 1, "spatial by columns": 2}
"""How many candidates of each kind are timed, the best by prediction."""
HOPELESS = 1.5  # none that is predicted to take this many times what the best of its kind takes

RESIDENT, BOUND, UNLIKE = "weights fit the machine, not an SM", "many rows", "unlike stages"
Case = tuple[str, int, str]
CASES: tuple[Case, ...] = (
    ("chain 8x512 relu", 512, RESIDENT),
    ("chain 8x512 relu", 64, RESIDENT),
    ("chain 8x256 tanh", 131072, UNLIKE),
    ("chain 8x512 relu", 1024, RESIDENT),
    ("chain 4x512 relu", 512, RESIDENT),
    ("chain 8x256 relu", 1024, RESIDENT),
    ("chain 8x256 relu", 262144, BOUND),
    ("chain 8x512 relu", 2048, RESIDENT),
    ("chain 8x384 relu", 1024, RESIDENT),
    ("chain 8x512 relu", 65536, BOUND),
    ("chain 4x512 gelu", 1024, RESIDENT),
    ("chain 16x512 relu", 512, RESIDENT),
    ("chain 16x256 relu", 16384, RESIDENT),
    ("chain 8x512 relu", 4096, RESIDENT),
    ("chain 16x128 relu", 65536, BOUND),
    ("chain 8x256 gelu", 131072, UNLIKE),
    ("chain 32x512 relu", 512, RESIDENT),
    ("chain 16x384 relu", 512, RESIDENT),
)
"""(model, rows, why it might win). Most wanted first."""
SWEEP = ((128, 256, 384, 512), (4, 8, 16, 32, 64), (512, 2048, 8192, 65536))

Prepared = tuple[str, Case, Region, list[Candidate]]


@dataclass(frozen=True)
class Row:
    """One way to run a case: microseconds predicted and measured; ``kind`` is one of ``KINDS``, or the fallback."""

    case: str
    rows: int
    why: str
    kind: str
    candidate: str
    predicted_us: float | None
    measured_us: float | None
    failed: str = ""


def kind_of(c: Candidate) -> str:
    if c.strategy != "spatial":
        return c.strategy
    return "spatial by columns" if c.detail.startswith("layers by") else "spatial by layers"


def candidates(region: Region, device: devices.Device) -> list[Candidate]:
    """The best few of each kind by prediction, and the fallback."""
    made = [
        c
        for strategy in ("vertical", "spatial")
        for c in proposals(region.program, region.rows, device, Options(strategy=strategy))
    ]
    found: list[Candidate] = []
    for kind, most in KINDS.items():
        legal = [c for c in made if kind_of(c) == kind and c.pipeline is not None]
        best = sorted(legal, key=lambda c: c.predicted_us or 0.0)[:most]
        found += [c for c in best if (c.predicted_us or 0.0) <= HOPELESS * (best[0].predicted_us or 0.0)]
    return [*found, made[-1]]


def row_of(case: Case, c: Candidate, found: float | Exception | None) -> Row:
    failed = f"{type(found).__name__}: {found}" if isinstance(found, Exception) else ""
    us = found if isinstance(found, float) else None
    return Row(*case, kind_of(c), c.name, c.predicted_us, us, failed)


def timed(case: Case, region: Region, found: Sequence[Candidate], device: devices.Device) -> tuple[list[Row], str]:
    """A case's candidates on the GPU, and what ``strategy="auto"`` makes of these times."""
    target = Target("cuda", region.device, device)
    measurer = Timer(region_trial(region, target), target)
    times = measurer(found)
    known = {c.name: t for c, t in zip(found, times, strict=True)}

    def measure(wanted: Sequence[Candidate]) -> list[float | Exception]:
        missing = [c for c in wanted if c.name not in known]
        known.update(zip((c.name for c in missing), measurer(missing) if missing else (), strict=True))
        return [known[c.name] for c in wanted]

    chosen = plan(region.program, region.rows, device, Options(), measure).chosen
    return [row_of(case, c, t) for c, t in zip(found, times, strict=True)], chosen.name


def dry(case: Case, region: Region, found: Sequence[Candidate], device: devices.Device) -> tuple[list[Row], str]:
    """A case's predictions; every kernel is compiled."""
    rows = []
    for c in found:
        problem: Exception | None = None
        if c.pipeline is not None:
            try:
                cuda.compile_only(c.pipeline)
            except TilestreamError as error:
                problem = error
        rows.append(row_of(case, c, problem))
    return rows, plan(region.program, region.rows, device, Options()).chosen.name


def prepared(only: str, kind: str, device: devices.Device) -> Iterator[Prepared]:
    """Each case with its region and candidates, whose kernels are begun."""
    for case in CASES:
        name = f"{case[0]}, {case[1]:,} rows"
        if only in name:
            region = region_of(case[0], case[1], kind)
            found = candidates(region, device)
            cuda.start([c.pipeline for c in found if c.pipeline is not None])
            yield name, case, region, found


def ahead(cases: Iterator[Prepared], most: int = 3) -> Iterator[Prepared]:
    """The same, ``most`` of them made before the first is given: compilers work while others are timed."""
    waiting = deque(islice(cases, most))
    while waiting:
        yield waiting.popleft()
        waiting.extend(islice(cases, 1))


def report(rows: Sequence[Row], chosen: str, seconds: float) -> None:
    print(f"{rows[0].case}, {rows[0].rows:,} rows ({seconds:.0f} s); auto: {chosen}")
    for r in rows:
        us = "" if r.measured_us is None else f"{r.measured_us:9.1f} us"
        guess = "" if r.predicted_us is None else f"{r.predicted_us:9.1f}"
        print(f"    {r.candidate:70s} {us:12s} {guess:9s} {r.failed[:90]}", flush=True)


def sweep(device: devices.Device) -> None:
    """The least prediction of each kind, and which is the least of all."""
    for width in SWEEP[0]:
        for depth in SWEEP[1]:
            for rows in SWEEP[2]:
                region = region_of(f"chain {depth}x{width} relu", rows, "cpu")
                best = {kind_of(c): c.predicted_us for c in reversed(candidates(region, device))}
                cells = "  ".join(f"{kind} {us:8.1f}" for kind, us in best.items() if us is not None)
                print(f"{depth:3} x {width}, {rows:6,} rows: {cells}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="cases whose name holds this")
    parser.add_argument("--seconds", type=float, default=BUDGET_S, help="no case is begun later")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    without = given.dry_run or given.sweep
    if not without and (reason := cuda.available()):
        print(f"{reason} (--dry-run needs none)", file=sys.stderr)
        return 1
    device = devices.get("h200") if without else devices.detect()
    if device is None:
        print("no description fits this GPU", file=sys.stderr)
        return 1
    if given.sweep:
        sweep(device)
        return 0
    started = time.perf_counter()
    rows: list[Row] = []
    chosen: dict[str, str] = {}
    failed: dict[str, str] = {}
    for name, case, region, found in ahead(prepared(given.only, "cpu" if given.dry_run else "cuda", device)):
        begun = time.perf_counter()
        if begun - started > given.seconds:
            failed[name] = "not measured: out of time"
            continue
        try:
            made, chosen[name] = (dry if given.dry_run else timed)(case, region, found, device)
        except (TilestreamError, RuntimeError, ValueError) as failure:  # one case must not cost the others
            failed[name] = f"{type(failure).__name__}: {failure}"
            print(f"{name}: failed: {failed[name][:300]}", flush=True)
            continue
        rows += made
        report(made, chosen[name], time.perf_counter() - begun)
        data: dict[str, Any] = {
            "schema": 1,
            "environment": environment() if torch.cuda.is_available() else {},
            "device": device.name,
            "seconds": time.perf_counter() - started,
            "rows": [asdict(r) for r in rows],
            "chosen": chosen,
            "failed": failed,
        }
        if not given.dry_run:
            given.out.parent.mkdir(parents=True, exist_ok=True)
            given.out.write_text(json.dumps(data, indent=1) + "\n")
    broken = [r for r in rows if r.failed]
    print(f"{len(rows)} candidates, {len(broken)} failed; {len(failed)} cases left out", flush=True)
    return 0 if rows and not broken else 1


if __name__ == "__main__":
    sys.exit(main())
