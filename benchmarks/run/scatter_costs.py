"""Sums of rows by an index as torch, Inductor and sorted sums make them: what ``plan.scatter_cost`` is fitted to.

    python -m benchmarks.run.scatter_costs [--json FILE]

``index_add`` is torch's kernel, ``scatter_add`` torch's with the index expanded to all columns, as PyTorch Geometric
calls it, ``inductor`` what Inductor makes of that; all add to zeros, which they clear. ``sorted``: the sum in sorted
order, without the sort. Uniform indices, and those of a power law (the busiest node has a tenth of all edges). Every
arm a CUDA graph, arms in turn, medians. Needs an H100 or H200.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.run.sorted_keys import index_of
from tilestream.run import timing
from tilestream.run.device_ops import segment_reduce, segments

SIZES = [
    *((88_000, 15_200, 128, "uniform"), (1_000_000, 100_000, 64, "uniform"), (1_000_000, 100_000, 64, "power law")),
    *((1_000_000, 100_000, 128, "uniform"), (1_000_000, 100_000, 128, "power law"), (195_480, 65_160, 512, "uniform")),
    *((200_000, 300, 128, "uniform"), (100_000, 10_000, 64, "uniform"), (30_000, 3000, 64, "uniform")),
    *((1_000_000, 100_000, 16, "uniform"), (1_000_000, 100_000, 4, "uniform"), (1_000_000, 100_000, 1, "uniform")),
    *((1_000_000, 100_000, 4, "power law"), (1_000_000, 100_000, 1, "power law"), (5000, 500, 64, "uniform")),
]
COMPILED = 9
"""So many of them are compiled, which takes seconds each."""


def measure(edges: int, nodes: int, features: int, kind: str, dtype: torch.dtype, compiled: bool) -> dict[str, Any]:
    """Microseconds of each arm."""
    torch.compiler.reset()
    torch.manual_seed(0)
    index, rows = index_of(edges, nodes, kind), torch.randn(edges, features, device="cuda").to(dtype)

    def index_add() -> Tensor:
        return rows.new_zeros(nodes, features).index_add_(0, index, rows)

    def scatter_add(rows: Tensor, index: Tensor) -> Tensor:
        wide = index.view(-1, 1).expand_as(rows)
        return rows.new_zeros(nodes, features).scatter_add_(0, wide, rows)

    arms = {"index_add": index_add, "scatter_add": lambda: scatter_add(rows, index)}
    if compiled:
        inductor = torch.compile(scatter_add)
        arms["inductor"] = lambda: inductor(rows, index)
    if features * rows.element_size() % 16 == 0:
        order, starts, busy = segments(index, nodes)
        arms["sorted"] = lambda: segment_reduce(None, rows, order, starts, busy)
    us = dict(zip(arms, timing.timed_side_by_side(list(arms.values())), strict=True))
    return {"edges": edges, "nodes": nodes, "features": features, "kind": kind, "dtype": str(dtype), "us": us}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the results here too")
    args = parser.parse_args()
    found = []
    for dtype in (torch.float32, torch.bfloat16):
        for number, size in enumerate(SIZES):
            found.append(measure(*size, dtype, number < COMPILED))
            print(found[-1], flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
