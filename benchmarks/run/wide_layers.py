"""Layers wider than a fragment, over many rows: eager, Inductor, max-autotune and tilestream side by side.

    python -m benchmarks.run.wide_layers                 every case, some four minutes on an H200
    python -m benchmarks.run.wide_layers residual mixer  some of them
    python -m benchmarks.run.wide_layers --autotune      Inductor's max-autotune too, minutes more
    python -m benchmarks.run.wide_layers --out FILE      instead of benchmarks/results/wide_layers.json

Each row is a whole ``tilestream bench``: CUDA graphs in every arm, interleaved, medians, errors against float64, what
the planner timed and what the cost model had said. ``docs/wide-layers.md`` has the floors of these shapes.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from benchmarks.lib.places import RESULTS
from tilestream import bench
from tilestream.apps import APPS
from tilestream.apps.load import Workload
from tilestream.apps.zoo import mlp
from tilestream.options import Options

OUT = RESULTS / "wide_layers.json"


class Block(nn.Module):
    """x + W2 gelu(W1 norm(x))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(self.norm(x))


class GatedBlock(nn.Module):
    """x + W3 (silu(W1 norm(x)) * (W2 norm(x)))."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(width)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(nn.functional.silu(self.gate(y)) * self.up(y))


class PointCloud(nn.Module):
    """[clouds, points, 3]: a layer a point to 1024 features, their maximum over the points, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.points, self.head = mlp([3, 64, 64, 64, 128, 1024], nn.ReLU), mlp([1024, 512, 256, 40], nn.ReLU)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.points(x).amax(1))


class Projections(nn.Module):
    """Queries, keys and values: three layers of one input."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return self.q(x), self.k(x), self.v(x)


class Output(nn.Module):
    """x + W a."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.out = nn.Linear(width, width)

    def forward(self, a: Tensor, x: Tensor) -> Tensor:
        return x + self.out(a)


def blocks(count: int, kind: type[nn.Module], width: int, hidden: int) -> nn.Module:
    return nn.Sequential(*(kind(width, hidden) for _ in range(count)))


Shape = tuple[int, ...]
Make = Callable[[], tuple[nn.Module, Shape] | tuple[nn.Module, Shape, Shape]]
"""A model and the shapes of its inputs."""
CASES: dict[str, Make] = {
    "residual": lambda: (blocks(4, Block, 192, 384), (114723, 192)),
    "residual_wide": lambda: (blocks(2, Block, 256, 1024), (65536, 256)),
    "gated": lambda: (blocks(1, GatedBlock, 256, 688), (65536, 256)),
    "autoencoder_wide": lambda: (mlp([256, 1024, 64, 1024, 256], nn.ReLU), (65536, 256)),
    "vit_tiny": lambda: (blocks(2, Block, 192, 768), (50432, 192)),
    "mlp_400": lambda: (mlp([416, 400, 400, 400, 1], nn.ReLU), (131072, 416)),
    "mlp_512": lambda: (mlp([512, 512, 512, 512], nn.ReLU), (131072, 512)),
    "mlp_384_gelu": lambda: (mlp([384, 384, 384, 384], nn.GELU), (131072, 384)),
    "dlrm_top": lambda: (mlp([479, 1024, 1024, 512, 256, 1], nn.ReLU), (32768, 479)),
    "dlrm_top_small": lambda: (mlp([479, 1024, 1024, 512, 256, 1], nn.ReLU), (2048, 479)),
    "bert_ffn": lambda: (blocks(1, Block, 768, 3072), (16384, 768)),
    "projections": lambda: (Projections(768), (16384, 768)),
    "output": lambda: (Output(768), (16384, 768), (16384, 768)),
    "points": lambda: (PointCloud(), (128, 1024, 3)),
}
ZOO = {"mixer": 131072}


def workload(name: str, device: str) -> Workload:
    if name in ZOO:
        module, inputs = APPS[name].make(ZOO[name], device=device)
        return Workload(name, module, inputs)
    torch.manual_seed(0)
    module, *shapes = CASES[name]()
    inputs = tuple(torch.randn(*shape, device=device, dtype=torch.bfloat16) for shape in shapes)
    return Workload(name, module.to(device, torch.bfloat16).eval().requires_grad_(False), inputs)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"some of {', '.join((*CASES, *ZOO))}")
    parser.add_argument("--autotune", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    arms = [a for a in bench.ARMS if given.autotune or a != "inductor_max_autotune"]
    made = json.loads(given.out.read_text()) if given.out.exists() else {}
    for name in given.cases or (*CASES, *ZOO):
        start = time.perf_counter()
        with torch.no_grad():
            found = bench.run(workload(name, "cuda"), Options(), arms=arms, predict=("h200",))
        made[name] = found
        given.out.write_text(json.dumps(made, indent=1) + "\n")
        times = ", ".join(f"{a} {r['us']:.1f}" for a, r in found["arms"].items() if r["us"])
        print(f"{name}: {times} us; ok {found['ok']}; {time.perf_counter() - start:.0f} s", flush=True)
        for region in found["plan"]["regions"]:
            for c in region["candidates"]:
                print(
                    "   ",
                    {k: c[k] for k in ("strategy", "detail", "predicted_us", "measured_us", "rejected") if c.get(k)},
                )
    return 0


if __name__ == "__main__":
    sys.exit(main())
