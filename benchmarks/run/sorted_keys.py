"""Edges sorted by node: kernels of ours beside torch's stable sort with what else ``segments`` gives.

    python -m benchmarks.run.sorted_keys [--json FILE] [--kernels]

Every arm a CUDA graph, arms in turn, medians; ``--kernels`` has each kernel's time by torch's profiler as well. The
floor: the index read twice, order, starts, a copy of the edges a pass written and read, at 4.3 TB/s. Needs an H100
or H200.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.kernel_times import kernels_of
from tilestream.cuda.sorted_keys import digits_of
from tilestream.kernels.coefficients.sums_by_index import BYTES_PER_US, sort
from tilestream.run import timing
from tilestream.run.device_ops import segments

CASES = [
    *(
        (edges, max(1, edges // 10), "uniform")
        for edges in (1000, 8000, 30_000, 100_000, 300_000, 1_000_000, 2_000_000)
    ),
    *((1_000_000, 100_000, kind) for kind in ("power law", "sorted", "equal", "int32", "backwards")),
    *((88_000, 15_200, "uniform"), (1_000_000, 1000, "uniform"), (1_000_000, 4_000_000, "uniform")),
    *((53_248, 921_000, "uniform"), (851_968, 921_000, "uniform"), (10_000_000, 1_000_000, "uniform")),
]


def index_of(edges: int, nodes: int, kind: str) -> Tensor:
    """int64 unless its kind says otherwise."""
    if kind == "equal":
        return torch.full((edges,), nodes // 2, device="cuda")
    if kind == "power law":  # a node's edges fall with its number: the busiest has a tenth
        skewed = torch.rand(edges, device="cuda", dtype=torch.float64).pow(-1.1) - 1
        return torch.randperm(nodes, device="cuda")[skewed.clamp(max=nodes - 1).long()]
    index = torch.randint(nodes, (edges,), device="cuda")
    if kind in ("sorted", "backwards"):
        return index.sort(descending=kind == "backwards").values
    return index.int() if kind == "int32" else index


def by_torch(index: Tensor, nodes: int) -> tuple[Tensor, Tensor]:
    """The same by torch's kernels, without checks and busy nodes."""
    keys, order = torch.sort(torch.where(index < 0, index + nodes, index).int(), stable=True)
    return order.int(), torch.searchsorted(
        keys, torch.arange(nodes + 1, device="cuda", dtype=torch.int32), out_int32=True
    )


def measure(edges: int, nodes: int, kind: str, kernels: bool) -> dict[str, Any]:
    """Microseconds of each arm."""
    torch.manual_seed(0)
    index = index_of(edges, nodes, kind)
    got, wanted = segments(index, nodes)[:2], by_torch(index, nodes)
    assert all(torch.equal(a, b) for a, b in zip(got, wanted, strict=True))
    keys = index.int()
    arms = (lambda: segments(index, nodes), lambda: by_torch(index, nodes), lambda: torch.sort(keys, stable=True))
    us = dict(zip(("ours", "torch", "torch.sort of int32"), timing.timed_side_by_side(arms), strict=True))
    passes = digits_of(nodes)[1]
    moved = edges * (2 * index.element_size() + 4) + 4 * nodes + 16 * (passes - 1) * edges + 8 * edges
    found = {"edges": edges, "nodes": nodes, "kind": kind, "us": us, "floor_us": moved / BYTES_PER_US}
    found["predicted_us"] = sort(edges).us
    if kernels:
        captured = timing.capture(lambda: segments(index, nodes), most_calls=1)
        found["kernels"] = [str(kernel) for kernel in kernels_of(captured)]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--json", type=Path, help="write the results here too")
    args = parser.parse_args()
    found = []
    for case in CASES:
        found.append(measure(*case, args.kernels))
        print(found[-1], flush=True)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
