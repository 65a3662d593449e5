"""Sums of rows by an index: PyTorch's and Inductor's atomics beside sums in sorted order, with the sort and without.

    python -m benchmarks.run.message_passing  the cases below
    python -m benchmarks.run.message_passing mgn tables_32768 --dtype f32 --json FILE

``ends`` sums the gradients of both ends of all edges, columns of one matrix, to what is there; ``tables`` those of
DLRM's tables, where the other arms add to all tables' rows at once as well. Random indices, random data; every arm a
CUDA graph, arms in turn, medians. Errors are against float64; the same input must give the same bits twice. Needs an
H100 or H200.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tilestream.apps.dlrm import CRITEO_ROWS
from tilestream.kernels.coefficients.sums_by_index import BYTES_PER_US
from tilestream.run import timing
from tilestream.run.device_ops import segment_reduce, segments

ARMS = ("eager", "inductor", "sorted", "sort")
DTYPES = {"bf16": torch.bfloat16, "f16": torch.float16, "f32": torch.float32}


@dataclass(frozen=True)
class Case:
    """``parts`` sums of ``edges`` rows each, every ``every``-th row of a matrix, to ``nodes`` rows of ``features``;
    ``based``: to what is there."""

    edges: int
    nodes: int
    features: int
    parts: int = 1
    every: int = 1
    based: bool = True


TABLES = sum(min(rows, 100_000) for rows in CRITEO_ROWS)
CASES = {
    "mgn": Case(88_000, 15_200, 128),
    "mgn_ends": Case(88_000, 15_200, 128, parts=2, every=3),
    "mgn_200000": Case(198_000, 34_200, 128),
    "mgn_200000_ends": Case(198_000, 34_200, 128, parts=2, every=3),
    "graphcast_mesh": Case(81_900, 10_242, 512),
    "graphcast_mesh_ends": Case(81_900, 10_242, 512, parts=2, every=3),
    "graphcast_grid": Case(195_480, 65_160, 512),
    "pooling": Case(200_000, 300, 128, based=False),
    "tables_2048": Case(26 * 2048, TABLES, 128, based=False),
    "tables_32768": Case(26 * 32_768, TABLES, 128, based=False),
}


def index_of(case: Case, name: str) -> Tensor:
    """Uniform ends; of ``tables`` uniform lookups of each table, in its own rows of the sum."""
    if not name.startswith("tables"):
        return torch.randint(case.nodes, (case.parts * case.edges,), device="cuda")
    heights = sorted(min(rows, 100_000) for rows in CRITEO_ROWS)
    lookups, first, found = case.edges // len(heights), 0, []
    for height in heights:
        found.append(first + torch.randint(height, (lookups,), device="cuda"))
        first += height
    return torch.cat(found)


def measure(name: str, dtype: torch.dtype, wanted: Sequence[str]) -> dict[str, Any]:
    """Microseconds of each arm, errors, and the floor."""
    torch.compiler.reset()
    torch.manual_seed(0)
    case = CASES[name]
    matrix = torch.randn(case.every * case.edges, case.features, device="cuda").to(dtype)
    base = torch.randn(case.nodes, case.features, device="cuda").to(dtype)
    index = index_of(case, name)
    ends = [(index[k * case.edges : (k + 1) * case.edges], matrix[k :: case.every]) for k in range(case.parts)]
    numbers = torch.cat([torch.arange(case.edges, device="cuda") * case.every + k for k in range(case.parts)]).int()

    def atomics(base: Tensor) -> Tensor:
        for at, (to, rows) in enumerate(ends):
            total = torch.zeros_like(base).index_add(0, to, rows)
            base = base + total if case.based or at else total
        return base

    def ordered() -> tuple[Tensor, Tensor, Tensor]:
        order, starts, busy = segments(index, case.nodes)
        return numbers[order], starts, busy

    rows, starts, busy = ordered()
    inductor = torch.compile(atomics)
    added = base if case.based else None
    arms: dict[str, Callable[[], object]] = {
        "eager": lambda: atomics(base),
        "inductor": lambda: inductor(base),
        "sorted": lambda: segment_reduce(added, matrix, rows, starts, busy),
        "sort": ordered,
    }
    arms = {arm: arms[arm] for arm in wanted}
    exact = base.double() if case.based else torch.zeros_like(base, dtype=torch.float64)
    for to, given in ends:
        exact = exact.index_add(0, to, given.double())
    errors = {
        arm: float((call().double() - exact).norm() / exact.norm())  # pyright: ignore[reportAttributeAccessIssue]
        for arm, call in arms.items()
        if arm != "sort"
    }
    once, again = (segment_reduce(added, matrix, rows, starts, busy) for _ in range(2))
    assert torch.equal(once, again)
    us = dict(zip(arms, timing.timed_side_by_side(list(arms.values())), strict=True))
    moved = (case.parts * case.edges + (2 if case.based else 1) * case.nodes) * case.features * base.element_size()
    return {"case": name, "dtype": str(dtype), "us": us, "errors": errors, "floor_us": moved / BYTES_PER_US}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--dtype", choices=DTYPES, default="bf16")
    parser.add_argument("--arms", nargs="+", default=ARMS, choices=ARMS)
    parser.add_argument("--json", type=Path, help="write the results here too")
    args = parser.parse_args()
    found = []
    for name in args.cases or CASES:
        found.append(measure(name, DTYPES[args.dtype], args.arms))
        times = ", ".join(f"{arm} {us:.1f}" for arm, us in found[-1]["us"].items())
        print(
            f"{name} {args.dtype}: {times} us; floor {found[-1]['floor_us']:.1f} us; {found[-1]['errors']}", flush=True
        )
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
