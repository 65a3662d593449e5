"""Time chains that store what their layers make, as a training step's forward pipeline does, on the GPU that is there.

    python benchmarks/stored_layers.py            every way to run each; writes results/stored_layers.json
    python benchmarks/stored_layers.py --dry-run  predictions alone, no GPU

What a layer stores goes through staging in shared memory and one warp that copies it. The constant of that way in the
cost model is to be judged by these; the training step of NeRF has no part in it. As ``candidates.py`` otherwise.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from pathlib import Path

import torch
from candidates import RESULTS, Row, candidates, report, row_of
from torch import Tensor, nn

from tilestream import devices
from tilestream.errors import TilestreamError
from tilestream.graph import capture, selection
from tilestream.graph.region import Region
from tilestream.run.measure import Measurer
from tilestream.run.target import Target

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


def region_of(width: int, layers: int, stored: int, rows: int, device: str) -> Region:
    torch.compiler.reset()
    module = Stored(width, layers, stored).to(device, torch.bfloat16).requires_grad_(False)
    inputs = (torch.randn(rows, width, device=device, dtype=torch.bfloat16),)
    (found,) = [r for graph in capture.capture(module, inputs).graphs for r in selection.partition(graph).regions]
    return found


def main() -> int:
    dry = "--dry-run" in sys.argv
    device = devices.get("h200") if dry else devices.detect()
    assert device is not None, "no description fits this GPU"
    rows: list[Row] = []
    for width, layers, stored, count in CASES:
        name = f"{layers} x {width}, {stored} stored"
        region = region_of(width, layers, stored, count, "cpu" if dry else "cuda")
        found = candidates(region, device)
        try:
            times = [None] * len(found)
            if not dry:
                times = Measurer(region, Target("cuda", region.device, device), against=False)(found)
        except (TilestreamError, RuntimeError) as failure:
            print(f"{name}: {failure}")
            continue
        rows += [row_of(name, region, c, t) for c, t in zip(found, times, strict=True)]
        report(rows[-len(found) :])
    if not dry:
        data = {"schema": 1, "gpu": torch.cuda.get_device_name(), "rows": [asdict(r) for r in rows]}
        Path(RESULTS / "stored_layers.json").write_text(json.dumps(data, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
