"""Convolution chains and ResNet-50, channels last: tilestream against eager cuDNN, Inductor and max-autotune.

    python -m benchmarks.run.conv_chains                          FlashFuser's C1 to C8, tails of bottlenecks, ResNet-50
    python -m benchmarks.run.conv_chains C5 tail56 --images 1 32
    python -m benchmarks.run.conv_chains C1 C5 --autotune --seconds 80  max-autotune too; what ends in time
    python -m benchmarks.run.conv_chains --dry-run                predictions and floors alone: needs no GPU

bf16, random data; every arm a CUDA graph, all arms of a workload in turn, medians, warm L2. Errors are against float64;
results are poisoned with NaN before each check, and two calls must give the same bits. What the planner chose for each
region stands beside the time. Rows of a workload replace those of earlier runs.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.lib.block_models import ResNet
from benchmarks.lib.budget import Budget
from benchmarks.lib.places import RESULTS
from tilestream import devices
from tilestream.bench.environment import environment
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.plan.parts import RegionAnalysis
from tilestream.run import prepare
from tilestream.run.backend import tilestream
from tilestream.run.timing import capture, interleaved

ROUNDS = 20
RESNET = "resnet50"
SETTINGS: dict[str, dict[str, Any]] = {
    "inductor": {},
    "tilestream": {"backend": tilestream},
    "max-autotune": {"mode": "max-autotune-no-cudagraphs"},
}
"""The slowest to compile comes last: it is the first to be left out."""
TUNED = "max-autotune"
GUESS_S = {"inductor": 5.0, "tilestream": 8.0, "max-autotune": 15.0}
RESNET_GUESS_S = {"inductor": 25.0, "tilestream": 40.0, "max-autotune": 200.0}
"""What the first call of an arm takes at most, until one was seen."""
CHUNK_US = 2.0  # of a loader warp, for 64 rows x 128 bytes copied by lanes: measured on rows through an index


@dataclass(frozen=True)
class Workload:
    """``k x k``, ReLU, 1 x 1; a tail has batch norms, a residual and a ReLU behind it."""

    channels: int
    size: int
    middle: int
    out: int
    taps: int
    tail: bool = False

    def floors(self, images: int) -> dict[str, float]:
        """Microseconds on an H200 of what must be done: products, DRAM, the L2 (taps read again, weights for every 128
        rows), and lanes that copy pixels."""
        device = devices.get("h200")
        rows, depth = images * self.size**2, self.taps**2 * self.channels
        weights = 2 * (depth * self.middle + self.middle * self.out)
        out_bytes = 2 * rows * self.out * (2 if self.tail else 1)
        chunks = self.taps**2 * ceil(self.channels / 64) if self.taps > 1 else 0
        loaders = min(2 * device.sms, ceil(rows / 64))
        return {
            "tensor": rows * weights / device.tensor_flops["bf16"] * 1e6,
            "dram": (2 * rows * self.channels + out_bytes + weights) / device.dram_bytes_per_s * 1e6,
            "l2": (2 * rows * depth + out_bytes + ceil(rows / 128) * weights) / device.l2_bytes_per_s * 1e6,
            "lanes": ceil(rows / 64) * chunks * CHUNK_US / loaders,
        }


WORKLOADS = {
    "C1": Workload(64, 56, 256, 64, 1),
    "C2": Workload(128, 28, 512, 128, 1),
    "C3": Workload(256, 14, 1024, 256, 1),
    "C4": Workload(512, 7, 2048, 512, 1),
    "C5": Workload(64, 56, 64, 256, 3),
    "C7": Workload(256, 14, 256, 1024, 3),
    "C8": Workload(512, 7, 512, 2048, 3),
    "tail56": Workload(64, 56, 64, 256, 3, True),
    "tail28": Workload(128, 28, 128, 512, 3, True),
}


class Chain(nn.Module):
    """A workload as a module."""

    def __init__(self, w: Workload) -> None:
        super().__init__()
        self.first = nn.Conv2d(w.channels, w.middle, w.taps, padding=w.taps // 2, bias=False)
        self.second = nn.Conv2d(w.middle, w.out, 1, bias=False)
        self.tail = w.tail
        self.norms = nn.ModuleList([nn.BatchNorm2d(n) for n in (w.middle, w.out)] if w.tail else [])
        for conv in (self.first, self.second):
            nn.init.normal_(conv.weight, std=(conv.weight[0].numel()) ** -0.5)

    def forward(self, x: Tensor, kept: Tensor) -> Tensor:
        h = self.first(x)
        h = functional.relu(self.norms[0](h) if self.tail else h)
        h = self.second(h)
        return functional.relu(self.norms[1](h) + kept) if self.tail else h


@dataclass
class Row:
    """One arm: microseconds, relative error against float64, and what the arm is."""

    workload: str
    images: int
    arm: str
    us: float
    error: float
    same_bits: bool
    detail: str = ""


def made(w: Workload, images: int, device: str) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model = Chain(w).bfloat16().to(device).eval()
    for conv in (model.first, model.second):  # their memory is then that of a linear over taps
        conv.weight.data = conv.weight.data.contiguous(memory_format=torch.channels_last)

    def picture(channels: int) -> Tensor:
        x = torch.randn(images, channels, w.size, w.size, device=device, dtype=torch.bfloat16)
        return x.contiguous(memory_format=torch.channels_last)

    return model, [picture(w.channels), picture(w.out)]


def resnet(images: int, device: str) -> tuple[nn.Module, list[Tensor]]:
    torch.manual_seed(0)
    model = ResNet().bfloat16().to(device).eval()
    x = torch.randn(images, 3, 224, 224, device=device, dtype=torch.bfloat16)
    taken = model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    return taken, [x.contiguous(memory_format=torch.channels_last)]


def module(name: str, images: int, device: str) -> tuple[nn.Module, list[Tensor]]:
    """What is timed, and its inputs."""
    return resnet(images, device) if name == RESNET else made(WORKLOADS[name], images, device)


def planned(name: str, images: int) -> Sequence[RegionAnalysis]:
    """The regions, as the cost model has them on an H200; no GPU is asked."""
    model, inputs = module(name, images, "cpu")
    torch._dynamo.reset()
    with torch.no_grad():
        return analyse(model, inputs, Options(device="h200")).regions


def prediction(name: str, images: int) -> str:
    """By the cost model: the best pipeline of the region with most products, and Inductor."""
    regions = [r for r in planned(name, images) if r.plan is not None]
    whole = max(regions, key=lambda r: sum(op.kind == "linear" for op in r.program.stages[0].ops))
    assert whole.plan is not None
    legal = [c for c in whole.plan.candidates if c.predicted_us is not None]
    best = min((c for c in legal if c.strategy != "fallback"), key=lambda c: c.predicted_us or 0.0)
    others = min(c.predicted_us or 0.0 for c in legal if c.strategy == "fallback")
    return f"{best.name} {best.predicted_us:.1f}, Inductor {others:.1f} us"


def checked(run: Callable[[], Tensor], exact: Tensor) -> tuple[float, bool]:
    """Error, and whether two calls give the same bits; memory that was poisoned between them shows what is not
    written."""
    first = run().clone()
    out = run()
    out.fill_(float("nan"))
    again = run()
    return float((again.double() - exact).norm() / exact.norm()), bool(torch.equal(again, first))


def chosen(since: int) -> str:
    """What the planner took for the regions that were compiled since then."""
    names = [a.plan.chosen.name if a.plan is not None else a.problem for a in prepare.analyses()[since:]]
    return "; ".join(f"{n} x {names.count(n)}" if names.count(n) > 1 else n for n in dict.fromkeys(names))


def workload(name: str, images: int, autotune: bool, budget: Budget) -> list[Row]:
    """All arms of one workload that end in time."""
    model, inputs = module(name, images, "cuda")
    arms: dict[str, Callable[[], Tensor]] = {"eager": lambda: model(*inputs)}
    details: dict[str, str] = {}
    torch._dynamo.reset()  # not between arms: it would have them compiled again
    with torch.no_grad():
        for arm, words in SETTINGS.items():
            kind, guess_s = (f"{arm} {name}", RESNET_GUESS_S) if name == RESNET else (arm, GUESS_S)
            if (arm == TUNED and not autotune) or not budget.affords(kind, guess_s[arm]):
                continue
            before = len(prepare.analyses())
            with budget.step(kind):
                compiled = torch.compile(model, dynamic=False, **words)
                compiled(*inputs)
            arms[arm] = lambda compiled=compiled: compiled(*inputs)
            details[arm] = chosen(before) if arm == "tilestream" else ""
            for region in prepare.analyses()[before:]:
                timed = [c for c in region.plan.candidates if c.measured_us] if region.plan is not None else []
                told = ", ".join(f"{c.name} {c.measured_us:.1f}" for c in timed)
                print(f"  {region.rows} rows: {region.problem or told}", flush=True)
        wide = copy.deepcopy(model).double()
        exact = wide(*[t.double() for t in inputs])
        errors = {arm: checked(run, exact) for arm, run in arms.items()}
        captured = [capture(run) for run in arms.values()]
        times = dict(zip(arms, map(statistics.median, interleaved(captured, ROUNDS)), strict=True))
    return [Row(name, images, arm, times[arm], *errors[arm], details.get(arm, "")) for arm in arms]


def merged(path: Path, rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Rows of earlier runs, but for the workloads that were timed anew; of those max-autotune's, where it was not."""
    before = json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else []
    again, tuned = {(r.workload, r.images) for r in rows}, {(r.workload, r.images) for r in rows if r.arm == TUNED}
    kept = [r for r in before if (r["workload"], r["images"]) not in (tuned if r["arm"] == TUNED else again)]
    return kept + [asdict(r) for r in rows]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*WORKLOADS, RESNET])
    parser.add_argument("--images", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--autotune", action="store_true", help="max-autotune is an arm too")
    parser.add_argument("--seconds", type=float, default=float("inf"), help="leave out what would end later")
    parser.add_argument("--dry-run", action="store_true", help="predictions and floors; no GPU")
    parser.add_argument("--out", type=Path, default=RESULTS / "conv_chains.json")
    given = parser.parse_args()
    if unknown := sorted(set(given.names) - {*WORKLOADS, RESNET}):
        parser.error(f"no shape is known of {', '.join(unknown)}; there are {', '.join([*WORKLOADS, RESNET])}")
    budget, rows = Budget(given.seconds), []
    for name in given.names:
        for images in given.images:
            if given.dry_run:
                floors = WORKLOADS[name].floors(images) if name != RESNET else {}
                told = ", ".join(f"{what} {us:.1f}" for what, us in floors.items())
                print(f"{name}, {images} images: floors {told}; predicted {prediction(name, images)}", flush=True)
                continue
            if not budget.affords(name, GUESS_S["tilestream"]):
                print(f"{name}, {images} images: left out, {budget.left_s:.0f} s are left", flush=True)
                continue
            try:
                with budget.step(name):
                    found = workload(name, images, given.autotune, budget)
            except Exception as failure:  # costs no other workload
                print(f"{name}, {images} images FAILED: {type(failure).__name__}: {failure}", flush=True)
                continue
            best = min(r.us for r in found if r.arm != "tilestream")
            for row in found:
                same = "same" if row.same_bits else "moves"
                print(f"{name} {images}  {row.us:8.2f}  x{best / row.us:.2f}  {row.error:.1e} {same}  {row.arm}"
                      f"  {row.detail}", flush=True)  # fmt: skip
            rows += found
            text = json.dumps({"environment": environment(), "rows": merged(given.out, rows)}, indent=1)
            given.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
