"""Convolution chains, channels last: our kernels against eager cuDNN, Inductor and max-autotune.

    python benchmarks/conv_chains.py                        FlashFuser's C1 to C5, and tails of ResNet-50's bottlenecks
    python benchmarks/conv_chains.py C5 tail56 --images 1 32
    python benchmarks/conv_chains.py --dry-run              predictions and floors alone: needs no GPU

bf16, random data; every arm a CUDA graph, all arms of a workload in turn, medians, warm L2. Errors are against float64;
results are poisoned with NaN before each check, and two calls must give the same bits. ``lanes`` and ``bulk`` are
``torch.compile`` with ``convolutions=``; what the planner chose, and how, stands beside its time.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import ceil
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilestream import devices
from tilestream.bench.environment import environment
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.run import prepare
from tilestream.run.backend import tilestream
from tilestream.run.timing import capture, interleaved

RESULTS = Path(__file__).parent / "results"
ROUNDS = 20
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


def predictions(name: str, images: int) -> dict[str, str]:
    """By the cost model: of either way to copy pixels, and of Inductor."""
    w = WORKLOADS[name]
    found: dict[str, str] = {}
    for how in ("lanes", "bulk"):
        model, inputs = made(w, images, "cpu")
        torch._dynamo.reset()
        with torch.no_grad():
            regions = analyse(model, inputs, Options(convolutions=how, device="h200")).regions
        whole = [r for r in regions if sum(op.kind == "linear" for op in r.program.stages[0].ops) > 1]
        legal = [c for r in whole if r.plan for c in r.plan.candidates if c.predicted_us is not None]
        if not legal:
            return {"": "no region has both convolutions"}
        ours = min((c for c in legal if c.strategy not in ("fallback", "bulk")), key=lambda c: c.predicted_us or 0)
        found[how] = f"{ours.predicted_us:.1f} ({ours.name})"
        found["Inductor"] = f"{min(c.predicted_us or 0 for c in legal if c.strategy == 'fallback'):.1f}"
    return found


def checked(run: Callable[[], Tensor], exact: Tensor) -> tuple[float, bool]:
    """Error, and whether two calls give the same bits; memory that was poisoned between them shows what is not
    written."""
    first = run().clone()
    out = run()
    out.fill_(float("nan"))
    again = run()
    return float((again.double() - exact).norm() / exact.norm()), bool(torch.equal(again, first))


def workload(name: str, images: int) -> list[Row]:
    model, inputs = made(WORKLOADS[name], images, "cuda")
    arms: dict[str, Callable[[], Tensor]] = {"eager": lambda: model(*inputs)}
    details: dict[str, str] = {}
    settings: dict[str, dict] = {
        "inductor": {},
        "max-autotune": {"mode": "max-autotune-no-cudagraphs"},
        "lanes": {"backend": tilestream, "options": {"convolutions": "lanes"}},
        "bulk": {"backend": tilestream, "options": {"convolutions": "bulk"}},
    }
    with torch.no_grad():
        for arm, words in settings.items():
            torch._dynamo.reset()
            compiled = torch.compile(model, dynamic=False, **words)
            compiled(*inputs)
            arms[arm] = lambda compiled=compiled: compiled(*inputs)
            if arm in ("lanes", "bulk"):
                last = prepare.analyses()[-1]
                details[arm] = last.plan.chosen.name if last.plan is not None else last.problem
        wide = Chain(WORKLOADS[name]).double().cuda().eval()
        wide.load_state_dict({n: t.double() for n, t in model.state_dict().items()})
        exact = wide(*[t.double() for t in inputs])
        errors = {arm: checked(run, exact) for arm, run in arms.items()}
        captured = [capture(run) for run in arms.values()]
        times = dict(zip(arms, map(statistics.median, interleaved(captured, ROUNDS)), strict=True))
    return [Row(name, images, arm, times[arm], *errors[arm], details.get(arm, "")) for arm in arms]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--images", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--dry-run", action="store_true", help="predictions and floors; no GPU")
    parser.add_argument("--out", type=Path, default=RESULTS / "conv_chains.json")
    given = parser.parse_args()
    rows: list[Row] = []
    for name in given.names or WORKLOADS:
        for images in given.images:
            floors = ", ".join(f"{what} {us:.1f}" for what, us in WORKLOADS[name].floors(images).items())
            print(f"{name}, {images} images: floors {floors}; predicted {predictions(name, images)}", flush=True)
            if given.dry_run:
                continue
            for row in workload(name, images):
                same = "same" if row.same_bits else "moves"
                print(f"  {row.us:8.2f}  {row.error:.1e} {same}  {row.arm}  {row.detail}", flush=True)
                rows.append(row)
    if rows:
        given.out.write_text(
            json.dumps({"environment": environment(), "rows": [asdict(r) for r in rows]}, indent=1) + "\n"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
