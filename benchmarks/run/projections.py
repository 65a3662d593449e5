"""Layers by themselves on few rows: one kernel against eager, Inductor and max-autotune.

    python -m benchmarks.run.projections                      all layers at 1, 16 and 128 rows
    python -m benchmarks.run.projections llama-qkv --rows 16  one of them
    python -m benchmarks.run.projections --prepare            compile everything and check values, time nothing
    python -m benchmarks.run.projections --dry-run            schedules and predictions; needs no GPU

bf16, random data; every arm a CUDA graph, all arms of a layer in turn, medians. ``warm`` repeats one set of weights;
``cold`` goes round sets that are together larger than the L2 (with ``--cold`` both do). Errors are against float64;
results are poisoned with NaN before each check, and must be the same bits twice.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from unittest import mock

import torch

from benchmarks.lib.places import RESULTS
from tilestream import cuda, devices
from tilestream.apps.layers import LAYERS, Layer
from tilestream.bench.environment import environment
from tilestream.errors import TilestreamError
from tilestream.kernels.product.shared_tile import model
from tilestream.options import Options
from tilestream.plan import few_rows
from tilestream.plan.cost import predict
from tilestream.plan.passes.share_tile import Split, share_tile
from tilestream.plan.passes.verified import apply
from tilestream.run.timing import capture, interleaved

ROUNDS = 15
ROWS = (16, 1, 128)


@dataclass
class Row:
    """One arm: microseconds warm and cold, relative error against float64, and what was predicted."""

    layer: str
    rows: int
    arm: str
    warm_us: float
    cold_us: float
    error: float
    same_bits: bool
    predicted_us: float | None = None


Run = Callable[[int], Sequence[torch.Tensor]]


def weight_bytes(layer: Layer) -> int:
    return 2 * layer.k * sum(layer.outs)


def recipes(layer: Layer, rows: int, most: int) -> list[tuple[Split, float]]:
    """Splits that a search times: the best by prediction, ``most`` of each way to add, first of all the best."""
    device = devices.get("h200")
    found = []
    for split in few_rows.best_splits(layer.program(), rows, device, Options()):
        pipeline = apply(few_rows.recipe_of(split).passes(device), layer.program())
        found.append((split, predict(pipeline, rows, device).us))
    found.sort(key=lambda each: each[1])
    tails = dict.fromkeys(split.tail for split, _ in found)
    best = [each for tail in tails for each in [x for x in found if x[0].tail is tail][:most]]
    return sorted(best, key=lambda each: each[1])


class Data:
    """Inputs and sets of weights of a layer: 120 MB together, or 64 sets."""

    def __init__(self, layer: Layer, rows: int, device: str = "cuda") -> None:
        count = min(64, max(2, ceil(120e6 / weight_bytes(layer))))
        first = layer.tensors(rows, device)
        rest = [{n: t if n in "xr" else t[torch.randperm(len(t), device=device)] for n, t in first.items()}
                for _ in range(count - 1)]  # fmt: skip
        self.layer, self.rows, self.sets = layer, rows, [first, *rest]

    def exact(self, n: int) -> list[torch.Tensor]:
        return [*self.layer.eager({name: t.double() for name, t in self.sets[n].items()}).values()]


def library(data: Data, tuned: bool) -> dict[str, Run]:
    def one(t: dict[str, torch.Tensor]) -> list[torch.Tensor]:
        return [*data.layer.eager(t).values()]

    torch._dynamo.reset()
    arms: dict[str, Run] = {"eager": lambda n: one(data.sets[n])}
    inductor = torch.compile(one, dynamic=False)
    arms["inductor"] = lambda n: inductor(data.sets[n])
    if tuned:
        most = torch.compile(one, dynamic=False, mode="max-autotune-no-cudagraphs")
        arms["max-autotune"] = lambda n: most(data.sets[n])
    return arms


FORMS = ("", ", dependent launch", ", rows exchanged")
"""Of the best split: as it is; launched while the kernel before still runs; rows made once, where each CTA could."""


def ours(data: Data, split: Split, form: str) -> Run:
    pipeline = share_tile(data.layer.program(), split)
    pipeline = replace(pipeline, name=pipeline.name + form.replace(", ", "_").replace(" ", "_"))
    most = 0 if form == FORMS[2] else model.MOST_OWN_ROWS
    with mock.patch.object(model, "MOST_OWN_ROWS", most):
        kernel = cuda.build(pipeline, dependent=form == FORMS[1])
    names = tuple(f"y{f}" for f in range(len(data.layer.outs)))
    results = tuple(torch.empty(data.rows, out, device="cuda", dtype=torch.bfloat16) for out in data.layer.outs)
    bound = [kernel.bind(s, data.rows, names) for s in data.sets]

    def run(n: int) -> Sequence[torch.Tensor]:
        bound[n](results)
        return results

    return run


def checked(run: Run, exact: Sequence[Sequence[torch.Tensor]]) -> tuple[float, bool]:
    """The largest error of any result over two sets of weights, and whether repeated runs give the same bits."""
    worst, same = 0.0, True
    for n, wanted in enumerate(exact):
        first = [y.clone() for y in run(n)]
        for _ in range(3):
            for y in run(n):
                y.fill_(float("nan"))
            same = same and all(torch.equal(y, x) for y, x in zip(run(n), first, strict=True))
        worst = max(worst, *(float((y.double() - x).norm() / x.norm()) for y, x in zip(run(n), wanted, strict=True)))
    return worst, same


def timed(arms: dict[str, Run], sets: int, warm: bool) -> dict[str, tuple[float, float]]:
    """Microseconds warm and cold."""

    def turning(run: Run) -> Callable[[], Sequence[torch.Tensor]]:
        count = [0]

        def step() -> Sequence[torch.Tensor]:
            count[0] += 1
            return run(count[0] % sets)

        return step

    found: dict[str, list[float]] = {}
    for make in ((lambda run: lambda: run(0)) if warm else turning, turning):
        captured = [capture(make(run), 500.0, max(sets, 40)) for run in arms.values()]
        for name, samples in zip(arms, interleaved(captured, ROUNDS), strict=True):
            found.setdefault(name, []).append(statistics.median(samples))
    return {name: (a, b) for name, (a, b) in found.items()}


def measured(name: str, rows: int, given: argparse.Namespace) -> list[Row]:
    layer = LAYERS[name]
    data = Data(layer, rows)
    exact = [data.exact(n) for n in range(2)]
    arms = library(data, given.tuned)
    predicted: dict[str, float] = {}
    found = recipes(layer, rows, given.most)
    cuda.start([share_tile(layer.program(), split) for split, _ in found])
    for k, (split, us) in enumerate(found):
        for form in FORMS if given.forms and k == 0 else FORMS[:1]:
            if form == FORMS[2] and (not layer.norm or split.tile_rows > model.MOST_OWN_ROWS):
                continue
            title = f"{split}{form}"
            try:
                arms[title] = ours(data, split, form)
                predicted[title] = us
            except TilestreamError as error:
                print(f"  {name} {split}: {error}", flush=True)
    errors = {arm: checked(run, exact) for arm, run in arms.items()}
    limit = 2 * errors["eager"][0] + 1e-4
    for arm, (error, same) in errors.items():
        if not (error <= limit and same):
            print(f"  WRONG {name} {rows} {arm}: error {error:.2e} of {limit:.2e}, same bits {same}", flush=True)
    if given.prepare:
        print(f"{name}, {rows} rows: {len(predicted)} kernels checked, worst {max(e for e, _ in errors.values()):.2e}")
        return []
    times = timed(arms, len(data.sets), not given.cold)
    made = [Row(name, rows, arm, *times[arm], *errors[arm], predicted.get(arm)) for arm in arms]
    best = min(r.cold_us for r in made if r.predicted_us is None)
    print(f"{name}, {rows} rows, {weight_bytes(layer) / 1e6:.1f} MB of weights", flush=True)
    for r in sorted(made, key=lambda r: r.cold_us):
        told = "" if r.predicted_us is None else f"predicted {r.predicted_us:.2f}"
        gain = f"x{best / r.cold_us:.2f}"
        print(f"  {r.warm_us:7.2f} {r.cold_us:7.2f}  {gain}  {r.error:.1e}  {r.arm}  {told}", flush=True)
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--rows", type=int, nargs="+", default=ROWS)
    parser.add_argument("--most", type=int, default=2, help="kernels of ours for each way to add")
    parser.add_argument("--tuned", action="store_true", help="max-autotune too")
    parser.add_argument("--forms", action="store_true", help="other forms of the best split too")
    parser.add_argument("--cold", action="store_true", help="weights from DRAM alone")
    parser.add_argument("--prepare", action="store_true", help="compile and check, time nothing")
    parser.add_argument("--dry-run", action="store_true", help="schedules and predictions alone")
    parser.add_argument("--seconds", type=float, default=1e9, help="start nothing new after so many")
    parser.add_argument("--out", type=Path, default=RESULTS / "projections.json")
    given = parser.parse_args()
    names, end = given.names or [*LAYERS], time.monotonic() + given.seconds
    if given.dry_run:
        for name in names:
            for rows in given.rows:
                for split, us in recipes(LAYERS[name], rows, given.most):
                    print(f"{name}, {rows} rows: {split}: {us:.2f} us")
        return 0
    torch.set_grad_enabled(False)
    made: list[Row] = []
    for rows in given.rows:
        for name in names:
            if time.monotonic() > end:
                break
            made += measured(name, rows, given)
            if not given.prepare:
                told = {"environment": environment(), "rows": [asdict(r) for r in made]}
                given.out.write_text(json.dumps(told, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
