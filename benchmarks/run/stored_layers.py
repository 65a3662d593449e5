"""Time chains that store what their layers make, as a training step's forward pipeline does, on the GPU that is there.

    python -m benchmarks.run.stored_layers            every way to run each; writes results/stored_layers.json
    python -m benchmarks.run.stored_layers --dry-run  predictions alone, no GPU

What a layer stores goes through staging in shared memory and one warp that copies it; rows of no multiple of 16 bytes
are stored by the threads that hold them. What the cost model says of both ways is to be judged by these; the training
step of NeRF has no part in it. As ``candidates.py`` otherwise.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.lib.places import RESULTS
from benchmarks.run.candidates import Row, candidates, report, row_of
from tilestream import devices
from tilestream.errors import TilestreamError
from tilestream.graph import capture, selection
from tilestream.graph.region import Region
from tilestream.run.target import Target
from tilestream.run.time_regions import region_trial
from tilestream.run.timer import Timer

CASES = (
    (256, 6, 6, 65536),
    (256, 6, 3, 65536),
    (128, 6, 6, 131072),
    (128, 6, 1, 131072),
    (256, 6, 1, 65536),
    (192, 4, 4, 131072),
    (64, 6, 6, 262144),
    (256, 10, 10, 131072),
)
"""Width, layers, how many of the last of them are stored, rows."""

ODD = (
    (256, 2, 255, 131072),
    (256, 2, 252, 131072),
    (256, 2, 256, 131072),
    (128, 3, 127, 262144),
    (128, 3, 126, 262144),
    (128, 1, 99, 262144),
    (64, 2, 17, 524288),
    (192, 4, 191, 65536),
)
"""Width, layers, width of the last layer, whose rows are stored; rows."""


class Stored(nn.Module):
    """Layers with ReLU; the results of the last ``stored`` of them."""

    def __init__(self, width: int, layers: int, stored: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.stored = stored

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        made = []
        for layer in self.layers:
            x = layer(x).relu()
            made.append(x)
        return tuple(made[-self.stored :])


def odd(width: int, layers: int, last: int) -> nn.Module:
    """Layers with ReLU, the last of another width."""
    widths = [width] * (layers + 1) + [last]
    return nn.Sequential(*(m for a, b in pairwise(widths) for m in (nn.Linear(a, b), nn.ReLU())))


def region_of(module: nn.Module, width: int, rows: int, device: str) -> Region:
    torch.compiler.reset()
    module = module.to(device, torch.bfloat16).requires_grad_(False)
    inputs = (torch.randn(rows, width, device=device, dtype=torch.bfloat16),)
    (found,) = [r for graph in capture.capture(module, inputs).graphs for r in selection.partition(graph).regions]
    return found


def main() -> int:
    dry = "--dry-run" in sys.argv
    device = devices.get("h200") if dry else devices.detect()
    assert device is not None, "no description fits this GPU"
    rows: list[Row] = []
    cases = [(f"{n} x {w}, then {last}", odd(w, n, last), w, rows) for w, n, last, rows in ODD]
    cases += [(f"{n} x {w}, {k} stored", Stored(w, n, k), w, rows) for w, n, k, rows in CASES]
    for name, module, width, count in cases:
        region = region_of(module, width, count, "cpu" if dry else "cuda")
        found = candidates(region, device)
        try:
            times = [None] * len(found)
            if not dry:
                target = Target("cuda", region.device, device)
                times = Timer(region_trial(region, target), target)(found)
        except (TilestreamError, RuntimeError) as failure:
            print(f"{name}: {failure}")
            continue
        rows += [row_of(name, region, c, t) for c, t in zip(found, times, strict=True)]
        report(rows[-len(found) :])
    if not dry:
        lines = ",\n".join(json.dumps(asdict(r)) for r in rows)  # pipelines are long: a line each
        head = json.dumps({"schema": 1, "gpu": torch.cuda.get_device_name()})[:-1]
        Path(RESULTS / "stored_layers.json").write_text(f'{head}, "rows": [\n{lines}\n]}}\n')
    return 0


if __name__ == "__main__":
    sys.exit(main())
