"""Launches one by one: what an H200 takes for each beside what is predicted today, by families.

    python -m benchmarks.fit.launch_truth           print all; write the table of docs/training-results.md; needs no GPU
    python -m benchmarks.fit.launch_truth --prepare seen  capture what is to be timed (launch_cases.json), no GPU
    python -m benchmarks.fit.launch_truth --measure  time it; writes results/launch_truth.json

bf16, random data; medians over CUDA graph replays of a dozen launches in turn. Backward regions read weights
transposed, so each is timed as it runs, its weights turned first, and with weights that lie as its kernel reads them.
No result is checked: what is timed here is checked where it is planned. A row carries the launch itself (``run.spec``),
so that a later cost model can be held against the same measurements. Widths of ``HELD_OUT`` had no part in any fit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from math import prod
from pathlib import Path

import torch

from benchmarks.fit import cost_truth as truth
from benchmarks.fit.launch_cases import ALL, H200, Launch
from benchmarks.fit.launch_cases import TRAINING as STEPS
from benchmarks.lib.marked import table
from benchmarks.lib.places import DOCS, RESULTS
from tilestream import cuda
from tilestream.errors import TilestreamError
from tilestream.ir.pipeline import Pipeline
from tilestream.plan.cost import predict
from tilestream.plan.shown import pipeline_us
from tilestream.plan.turned import copies_s
from tilestream.run.call import RegionCall
from tilestream.run.spec import TENSOR, RegionSpec, decode
from tilestream.run.timing import Captured, capture, interleaved

DOC = DOCS / "training-results.md"
BEGIN, END = "<!-- launches: made by benchmarks/fit/launch_truth.py -->", "<!-- launches: end -->"
TRAINING = ("forward", "backward", "gradients")
CASES, PATH = Path("launch_cases.json"), RESULTS / "launch_truth.json"
DEVICE = torch.device("cuda", 0)
HELD_OUT = (95, 131, 250)
"""Odd columns that are kept aside when constants are fitted."""
BATCH = 12
ROUNDS = 11
BURST_US, MOST_CALLS = 600.0, 20
BUDGET_S = 52.0


@dataclass(frozen=True)
class Row:
    """A launch and what it took: microseconds of a call, and of one whose weights need not be turned."""

    launch: Launch
    us: float
    straight_us: float | None


@dataclass(frozen=True)
class Point:
    """A row beside its predictions, in microseconds: the one that is shown, and the cost model's, which ranks."""

    row: Row
    shown: truth.Point
    ranked: truth.Point


def point(row: Row) -> Point:
    """Today's predictions of a measured row, copies of transposed weights included."""
    spec = decode(row.launch.spec)
    pipeline, rows = spec.pipeline, row.launch.rows
    turned = 1e6 * copies_s(_turned_bytes(spec))
    shown = pipeline_us(pipeline, rows, H200)
    assert shown is not None
    return Point(row, _beside(row, shown + turned), _beside(row, ranked_us(pipeline, rows) + turned))


def _beside(row: Row, predicted_us: float) -> truth.Point:
    launch = row.launch
    return truth.Point(launch.family, f"{launch.model} {launch.name}", launch.rows, row.us, predicted_us)


def ranked_us(pipeline: Pipeline, rows: int) -> float:
    """What the planner compares."""
    return predict(pipeline, rows, H200).us


def values_of(spec: RegionSpec, straight: bool) -> list[torch.Tensor]:
    """Random arguments as they lie in the call that was captured; ``straight``: weights lie as kernels read them."""
    dtypes = {o.index: o.dtype for o in (*spec.inputs, *spec.parameters)}
    matrices = {o.index: o for o in spec.parameters if len(spec.pipeline.tensor(o.tensor).shape) == 2}
    tables = {op.params[0] for s in spec.pipeline.stages for op in s.ops if op.kind == "load" and op.index}
    shapes = [shape for shape, _ in spec.layouts]
    heights = [shapes[o.index][0] for o in (*spec.inputs, *spec.parameters) if o.tensor in tables]
    made = []
    for index, (shape, strides) in enumerate(spec.layouts):
        held = 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
        if not dtypes[index].is_floating_point:
            made.append(torch.randint(min(heights, default=1), (held,), device=DEVICE).to(dtypes[index]))
        else:
            made.append(torch.randn(held, device=DEVICE).to(dtypes[index]))
        made[-1] = made[-1].as_strided(shape, strides)
        if index in matrices and len(shape) == 2:
            made[-1].div_(shape[0] ** 0.5)
            lies = made[-1].t() if ("t",) in matrices[index].steps else made[-1]
            if straight and lies.stride(1) != 1:
                made[-1] = lies.contiguous().t() if ("t",) in matrices[index].steps else lies.contiguous()
    return made


def _turned_bytes(spec: RegionSpec) -> list[int]:
    """Of each weight that lies as no kernel reads it."""
    found = []
    for o in spec.parameters:
        shape, strides = spec.layouts[o.index]
        strides = strides[::-1] if ("t",) in o.steps else strides
        if len(strides) == 2 and strides[1] != 1:
            found.append(o.dtype.itemsize * prod(shape))
    return found


def captured(spec: RegionSpec, straight: bool) -> Captured:
    """A call of the launch as a CUDA graph."""
    assert all(kind == TENSOR for kind in spec.arguments)
    values = values_of(spec, straight)
    call = RegionCall(spec, DEVICE, rescue=False)
    return capture(lambda: call(values), BURST_US, MOST_CALLS)


def measure(launches: Sequence[Launch], budget_s: float) -> Iterator[list[Row]]:
    """Rows, a batch at a time, as kernels are compiled; what fails is printed and left out."""
    started = time.perf_counter()
    specs = {launch: decode(launch.spec) for launch in launches}
    cuda.start(list(dict.fromkeys(s.pipeline for s in specs.values())))
    left = list(launches)
    while left and time.perf_counter() - started < budget_s:
        batch, arms = [], []
        while left and len(batch) < BATCH and time.perf_counter() - started < budget_s:
            index = cuda.first_ready([[specs[launch].pipeline] for launch in left], timeout_s=1.0)
            if index is None:
                continue
            launch = left.pop(index)
            try:
                ways = (False, True) if _turned_bytes(specs[launch]) else (False,)
                arms.append([captured(specs[launch], straight) for straight in ways])
                batch.append(launch)
            except (TilestreamError, RuntimeError) as failure:
                print(f"{launch.family} {launch.model} {launch.name}: {type(failure).__name__}: {failure}", flush=True)
        samples = iter(interleaved([arm for each in arms for arm in each], ROUNDS))
        rows = []
        for launch, each in zip(batch, arms, strict=True):
            us = [statistics.median(next(samples)) for _ in each]
            rows.append(Row(launch, us[0], us[1] if len(us) > 1 else None))
        yield rows
    for launch in left:
        print(f"{launch.family} {launch.model} {launch.name}: out of time", flush=True)


def write(rows: Sequence[Row], path: Path) -> None:
    head = json.dumps({"schema": 1, "gpu": torch.cuda.get_device_name()})[:-1]
    lines = ",\n".join(json.dumps(asdict(row)) for row in rows)
    path.write_text(f'{head}, "rows": [\n{lines}\n]}}\n')


def rows_of(path: Path) -> list[Row]:
    read = json.loads(path.read_text())["rows"]
    return [Row(Launch(**row["launch"]), row["us"], row["straight_us"]) for row in read]


def points(path: Path = PATH) -> list[Point]:
    """Every measured launch beside today's predictions."""
    return [point(row) for row in rows_of(path)]


def ranked(family: str) -> list[truth.Point]:
    """The launches of a family beside the cost model's predictions; copies that come before odd rows are no part."""
    made = []
    for row in rows_of(PATH):
        if row.launch.family == family and not _is_beside(row.launch):
            spec = decode(row.launch.spec)
            us = ranked_us(spec.pipeline, row.launch.rows) + 1e6 * copies_s(_turned_bytes(spec))
            made.append(_beside(row, us))
    return made


def _is_beside(launch: Launch) -> bool:
    columns, _, apart, *_ = launch.model.split() if launch.family.endswith("odd") else ("", "", "")
    return columns != apart


def scores(found: Sequence[truth.Point]) -> list[truth.Score]:
    """By family."""
    families = dict.fromkeys(p.group for p in found)
    return [truth.Score.of(f, [p for p in found if p.group == f]) for f in families]


def report(found: Sequence[Point]) -> None:
    """Every launch, then scores: of what is shown, and of what ranks."""
    for p in found:
        straight = f"{p.row.straight_us:8.1f}" if p.row.straight_us is not None else " " * 8
        said = " ".join(f"{of.predicted_us:8.1f} {of.error:+5.0%}" for of in (p.shown, p.ranked))
        print(f"{p.shown.group:16s} {p.shown.name:76s} {p.shown.rows:7d} {p.row.us:8.1f} {straight} {said}")
    for who, some in (("simulator", [p.shown for p in found]), ("cost model", [p.ranked for p in found])):
        for s in scores(some):
            print(f"{who:10s} {s.group:20s} {s.count:3d}  mean {s.mean:6.1%}  bias {s.bias:+6.1%}  worst {s.worst:.2f}")


def document(found: Sequence[Point]) -> str:
    """What stands between the markers of docs/training-results.md: scores, and every launch of a training step."""
    shown, ranked_ = ([getattr(p, what) for p in found] for what in ("shown", "ranked"))
    lines = [
        (
            of.group,
            str(of.count),
            f"{of.mean:.0%}",
            f"{of.bias:+.0%}",
            f"{of.worst:.2f}",
            f"{by.mean:.0%}",
            f"{by.worst:.2f}",
        )
        for of, by in zip(scores(shown), scores(ranked_), strict=True)
    ]
    heads = ("family", "launches", "mean error, simulator", "bias", "worst factor", "cost model", "worst factor")
    rows = [
        (p.shown.group, p.row.launch.model, p.row.launch.name, f"{p.shown.rows:,}")
        + (f"{p.row.us:.1f}", f"{p.shown.predicted_us:.1f}", f"{p.shown.error:+.0%}")
        for p in found
        if p.shown.group in TRAINING and p.row.launch.model in STEPS
    ]
    columns = ("family", "step", "launch", "rows", "measured us", "predicted us", "error")
    return f"{table(heads, lines)}\n\n{table(columns, rows, left=3)}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prepare", choices=tuple(ALL))
    parser.add_argument("--measure", action="store_true")
    parser.add_argument("--budget", type=float, default=BUDGET_S, help="seconds")
    parser.add_argument("--cases", type=Path, default=CASES)
    parser.add_argument("--out", type=Path, default=PATH)
    given = parser.parse_args()
    if given.prepare:
        found = [asdict(launch) for part in ALL[given.prepare] for launch in part()]
        given.cases.write_text(json.dumps(found, indent=0))
        print(f"{len(found)} launches")
    if given.measure:
        if why := cuda.available():
            print(why, file=sys.stderr)
            return 1
        launches = [Launch(**told) for told in json.loads(given.cases.read_text())]
        rows: list[Row] = []
        for some in measure(launches, given.budget):
            rows += some
            write(rows, given.out)
    elif given.out.exists():
        found = points(given.out)
        report(found)
        before, rest = DOC.read_text().split(BEGIN)
        DOC.write_text(f"{before}{BEGIN}\n\n{document(found)}\n\n{END}{rest.split(END)[1]}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
