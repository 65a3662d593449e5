"""Feed-forward blocks on few rows: shared tiles against the best of eager, fused cuBLAS, Inductor and max-autotune.

    python benchmarks/few_rows.py                  FlashFuser's G and S workloads
    python benchmarks/few_rows.py G4 S2 --planner  torch.compile(backend="tilestream") too
    python benchmarks/few_rows.py G4 --rows 1 16 64 128

bf16, random data; every arm a CUDA graph, all arms of a workload in turn, medians. ``warm`` repeats one set of weights;
``cold`` goes round sets that are together over twice the L2. Errors are against float64; results are poisoned with NaN
before each check, and deterministic kernels must give the same bits twice.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from unittest import mock

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes import b2b_gemm

from tilestream import cuda
from tilestream.bench.environment import environment
from tilestream.errors import TilestreamError
from tilestream.ir.pipeline import Pipeline
from tilestream.ir.plain import plain
from tilestream.ir.verify import verify
from tilestream.plan.dataflow.chain import Chain, Gate
from tilestream.plan.passes.share_tile import Split, share_tile, tiles_for
from tilestream.run import prepare
from tilestream.run.backend import tilestream
from tilestream.run.timing import capture, interleaved
from tilestream.schedule.shared_tile import Tail, build
from tilestream.schedule.shared_tile.model import TILES
from tilestream.schedule.sharing import Middle
from tilestream.studies.flashfuser import generated

RESULTS = Path(__file__).parent / "results"
ROUNDS = 15
MOST_B2B_BYTES = 20_000_000
"""Larger ones would take milliseconds: one CTA has all hidden columns of its rows."""


@dataclass(frozen=True)
class Workload:
    """``[rows, k]`` to ``hid`` to ``out``; gated ones have two first layers."""

    hid: int
    k: int
    out: int
    gated: bool = False

    @property
    def weight_bytes(self) -> int:
        return 2 * self.hid * (self.k * (1 + self.gated) + self.out)


WORKLOADS = {
    "G1": Workload(512, 32, 256),
    "G3": Workload(512, 416, 256),
    "G4": Workload(3072, 768, 768),
    "G5": Workload(16384, 4096, 4096),
    "G6": Workload(4096, 1024, 1024),
    "G8": Workload(8192, 2048, 2048),
    "G10": Workload(1536, 384, 384),
    "S1": Workload(8192, 3072, 3072, True),
    "S2": Workload(5632, 2048, 2048, True),
    "S3": Workload(11008, 4096, 4096, True),
    "S4": Workload(8192, 2048, 2048, True),
    "S5": Workload(11008, 2048, 2048, True),
    "S7": Workload(9728, 2560, 2560, True),
}

SPLITS = {  # the spike's best, and what else is near
    "G1": [(4, 8), (8, 4), (8, 2), (8, 8), (2, 16)],
    "G3": [(4, 16), (8, 8), (8, 4), (4, 8)],
    "G4": [(8, 16), (5, 24), (4, 32)],
    "G5": [(4, 32), (8, 16)],
    "G6": [(8, 16), (4, 32)],
    "G8": [(8, 16), (4, 32)],
    "G10": [(8, 16), (4, 24), (8, 12)],
    "S1": [(5, 24), (4, 32), (8, 16)],
    "S2": [(8, 16), (4, 32)],
    "S3": [(4, 32), (2, 64)],
    "S4": [(8, 16), (4, 32)],
    "S5": [(8, 16), (4, 32)],
    "S7": [(6, 20), (4, 32), (8, 16)],
}
CLUSTERS = {
    "G1": [(4, 16), (8, 8)],
    "G3": [(4, 16), (8, 8)],
    "G4": [(4, 24), (6, 16)],
    "G10": [(4, 24), (8, 12)],
}


SIDE_BY_SIDE = {  # shorter tiles of the 128 rows
    "G1": [(4, 8, 64, 2), (4, 4, 64, 2), (1, 8, 16, 8), (1, 4, 16, 8), (1, 32, 64, 2)],
    "G3": [(4, 8, 64, 2), (2, 16, 64, 2), (1, 8, 16, 8), (1, 16, 32, 4)],
    "G4": [(8, 8, 64, 2), (4, 16, 64, 2)],
    "G6": [(8, 8, 64, 2), (4, 16, 64, 2)],
    "G10": [(8, 8, 64, 2), (4, 16, 64, 2)],
}
"""Groups, columns, rows of a tile and tiles; one group of up to 8 hands its middle over through a cluster too."""


@dataclass
class Row:
    """One arm: microseconds warm and cold, relative error against float64, and what the arm is."""

    workload: str
    rows: int
    arm: str
    warm_us: float
    cold_us: float
    error: float
    same_bits: bool
    detail: str = ""


def program(w: Workload) -> Pipeline:
    """The block as a region's program."""
    gate = Gate.SEQUENTIAL if w.gated else Gate.NONE
    return generated.program(Chain("ffn", 128, w.hid, w.k, w.out, gate))


@dataclass
class Data:
    """Inputs and sets of weights of a workload: as many that they are over twice the L2."""

    x: torch.Tensor
    sets: list[dict[str, torch.Tensor]]

    @staticmethod
    def random(w: Workload, rows: int) -> Data:
        count = max(2, ceil(300e6 / w.weight_bytes)) if w.weight_bytes < 100e6 else 3

        def weight(out: int, depth: int) -> torch.Tensor:
            return torch.randn(out, depth, device="cuda", dtype=torch.bfloat16) / depth**0.5

        sets = []
        for _ in range(count):
            made = {"up": weight(w.hid, w.k), "down": weight(w.out, w.hid)}
            if w.gated:
                made["gate"] = weight(w.hid, w.k)
            sets.append(made)
        return Data(torch.randn(rows, w.k, device="cuda", dtype=torch.bfloat16), sets)

    def exact(self, w: Workload, n: int) -> torch.Tensor:
        s = {name: t.double() for name, t in self.sets[n].items()}
        u = self.x.double() @ s["up"].T
        h = F.silu(self.x.double() @ s["gate"].T) * u if w.gated else F.relu(u)
        return h @ s["down"].T


Run = Callable[[int], torch.Tensor]


def library(w: Workload, data: Data, compiled: bool, planner: bool, tuned: bool = True) -> dict[str, Run]:
    """Everything that there is without us, and ``torch.compile`` with us, as a function of which weights.

    Args:
        tuned: max-autotune too, which takes most of the time of a run.
    """

    def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        u = F.linear(x, up)
        h = F.relu(u) if gate is None else F.silu(F.linear(x, gate)) * u
        return F.linear(h, down)

    def other(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        return block(x, up, down, gate)  # a function of its own, so that it is compiled under its own settings

    def on(function: Callable[..., torch.Tensor]) -> Run:
        return lambda n: function(data.x, data.sets[n]["up"], data.sets[n]["down"], data.sets[n].get("gate"))

    arms = {"eager": on(block)}
    if not w.gated:
        zero = torch.zeros(w.hid, device="cuda", dtype=torch.bfloat16)
        relu_of = torch.ops.aten._addmm_activation.default
        arms["addmm_activation"] = lambda n: F.linear(
            relu_of(zero, data.x, data.sets[n]["up"].t()), data.sets[n]["down"]
        )
    if compiled:
        torch._dynamo.reset()
        arms["inductor"] = on(torch.compile(block, dynamic=False))
        if tuned:
            arms["max-autotune"] = on(torch.compile(block, dynamic=False, mode="max-autotune-no-cudagraphs"))
        if not w.gated and w.weight_bytes < MOST_B2B_BYTES:
            with back_to_back():
                arms["b2b_gemm forced"] = fused = on(torch.compile(other, dynamic=False))
                fused(0)  # compiles, in here
            if not counters["inductor"]["b2b_gemm"]:
                del arms["b2b_gemm forced"]
    if planner:
        arms["tilestream"] = on(torch.compile(block, dynamic=False, backend=tilestream))
    return arms


@contextlib.contextmanager
def back_to_back() -> Iterator[None]:
    """Inductor's ``b2b_gemm_pass`` wherever its pattern is found: without the gate that asks whether it pays, and
    without the two plain products that its tuning may fall back to."""
    select = b2b_gemm.__dict__["autotune_select_algorithm"]
    counters["inductor"]["b2b_gemm"] = 0
    with (
        mock.patch.object(b2b_gemm, "is_b2b_gemm_good_on", lambda *_: True),
        mock.patch.object(
            b2b_gemm, "autotune_select_algorithm", lambda name, choices, *rest: select(name, choices[:-1], *rest)
        ),
        inductor_config.patch(b2b_gemm_pass=True),
    ):
        yield


def ours(w: Workload, data: Data, split: Split, dependent: bool = False) -> Run:
    """A shared tile."""
    pipeline = share_tile(program(w), split)
    verify(pipeline)
    kernel = cuda.build(pipeline, dependent=dependent)
    rows = data.x.shape[0]
    y = torch.empty(rows, w.out, device="cuda", dtype=torch.bfloat16)
    bound = [kernel.bind({"x": data.x, **s}, rows, ("y",)) for s in data.sets]

    def run(n: int) -> torch.Tensor:
        bound[n]((y,))
        return y

    return run


def checked(run: Run, data: Data, exact: Sequence[torch.Tensor]) -> tuple[float, bool]:
    """The largest error over two sets of weights, and whether repeated runs give the same bits."""
    worst, same = 0.0, True
    for n in range(2):
        first = run(n).clone()
        for _ in range(3):
            out = run(n)
            out.fill_(float("nan"))
            out = run(n)
            same = same and torch.equal(out, first)
        worst = max(worst, ((out.double() - exact[n]).norm() / exact[n].norm()).item())
    return worst, same


def timed(arms: dict[str, Run], sets: int) -> dict[str, tuple[float, float]]:
    """Microseconds warm and cold."""

    def turning(run: Run) -> Callable[[], torch.Tensor]:
        count = [0]

        def step() -> torch.Tensor:
            count[0] += 1
            return run(count[0] % sets)

        return step

    found: dict[str, list[float]] = {}
    for make in (lambda run: lambda: run(0), turning):
        captured = [capture(make(run), 600.0, max(sets, 40)) for run in arms.values()]
        for name, samples in zip(arms, interleaved(captured, ROUNDS), strict=True):
            found.setdefault(name, []).append(statistics.median(samples))
    return {name: (warm, cold) for name, (warm, cold) in found.items()}


def workload(
    name: str,
    w: Workload,
    rows: int,
    compiled: bool,
    planner: bool,
    dependent: bool,
    splits: Sequence[Split],
    tuned: bool = True,
) -> list[Row]:
    """Every arm of a workload, checked and timed; those that are wrong are left out, and said."""
    data = Data.random(w, rows)
    exact = [data.exact(w, n) for n in range(2)]
    arms = library(w, data, compiled, planner, tuned)
    details: dict[str, str] = {}
    cuda.start([share_tile(program(w), s) for s in splits])
    for split in splits:
        pipeline = plain(share_tile(program(w), split))
        try:
            s = build(pipeline.stages[0], pipeline)
            arms[f"shared {split}"] = ours(w, data, split)
            details[f"shared {split}"] = (
                f"{s.middle_columns} + {s.out_columns} columns, {s.left_stages} + {s.weight_stages} stages of {s.depth}"
            )
            if dependent:
                arms[f"shared {split}, dependent launch"] = ours(w, data, split, dependent=True)
        except TilestreamError as error:
            print(f"  {name} {split}: {error}", flush=True)
    if planner:
        arms["tilestream"](0)
        plan = prepare.analyses()[-1].plan
        details["tilestream"] = plan.chosen.name if plan is not None else prepare.analyses()[-1].problem
    errors = {arm: checked(run, data, exact) for arm, run in arms.items()}
    good = {arm: run for arm, run in arms.items() if errors[arm][0] < 0.02}
    for arm in set(arms) - set(good):
        print(f"  WRONG {name} {arm}: error {errors[arm][0]:.2e}", flush=True)
    times = timed(good, len(data.sets))
    made = [Row(name, rows, arm, *times[arm], *errors[arm], details.get(arm, "")) for arm in good]
    others = [r for r in made if not r.arm.startswith(("shared", "tilestream"))]
    best = [min(getattr(r, what) for r in others) for what in ("warm_us", "cold_us")]
    print(f"{name}, {rows} rows, {w.weight_bytes / 1e6:.1f} MB of weights", flush=True)
    for r in sorted(made, key=lambda r: r.warm_us):
        print(
            f"  {r.warm_us:8.2f} {r.cold_us:8.2f}  x{best[0] / r.warm_us:.2f} x{best[1] / r.cold_us:.2f}"
            f"  {r.error:.1e} {'same' if r.same_bits else 'moves'}  {r.arm}  {r.detail}",
            flush=True,
        )
    return made


def chosen_splits(name: str, rows: int) -> list[Split]:
    tile_rows, row_tiles = tiles_for(rows)
    made = []
    for groups, columns in SPLITS[name]:
        groups = max(1, groups // row_tiles)
        for tail in (Tail.REDUCE_ADD, Tail.PARTIALS) if groups > 1 else (Tail.NONE,):
            made.append(Split(groups, columns, tail, tile_rows, row_tiles))
    if rows <= 64:  # the middle is short: groups may have many CTAs
        out = WORKLOADS[name].out // 8
        made += [Split(2, 64, tail, tile_rows) for tail in (Tail.REDUCE_ADD, Tail.PARTIALS, Tail.CLUSTER)]
        made += [Split(1, min(columns, out), Tail.NONE, tile_rows) for columns in (96, 128)]
        made = list(dict.fromkeys(made))
    if rows == TILES[-1]:
        for groups, columns, height, tiles in SIDE_BY_SIDE.get(name, []):
            tails = (Tail.REDUCE_ADD, Tail.PARTIALS, Tail.CLUSTER) if groups > 1 else (Tail.NONE,)
            made += [Split(groups, columns, tail, height, tiles) for tail in tails]
            if groups == 1 and columns <= 8:
                made.append(Split(1, columns, Tail.NONE, height, tiles, middle=Middle.DSM))
    if row_tiles == 1:
        made += [Split(g, c, Tail.CLUSTER, tile_rows) for g, c in CLUSTERS.get(name, [])]
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[])
    parser.add_argument("--rows", type=int, nargs="+", default=[128])
    parser.add_argument("--no-compile", action="store_true", help="eager and cuBLAS alone")
    parser.add_argument(
        "--planner", action="store_true", help="torch.compile with tilestream too, which plans by itself"
    )
    parser.add_argument("--untuned", action="store_true", help="no max-autotune, which takes most of the time")
    parser.add_argument("--dependent", action="store_true", help="programmatic dependent launch too")
    parser.add_argument("--out", type=Path, default=RESULTS / "few_rows.json")
    given = parser.parse_args()
    rows: list[Row] = []
    if given.out.exists():  # of other workloads, from another run
        rows = [Row(**row) for row in json.loads(given.out.read_text())["rows"]]
    torch.set_grad_enabled(False)
    for name in given.names or WORKLOADS:
        for count in given.rows:
            found = workload(
                name,
                WORKLOADS[name],
                count,
                not given.no_compile,
                given.planner,
                given.dependent,
                chosen_splits(name, count),
                not given.untuned,
            )
            kept = ["max-autotune"] if given.untuned else []  # of another run, which is said
            old = [r for r in rows if (r.workload, r.rows) == (name, count) and r.arm in kept]
            rows = [r for r in rows if (r.workload, r.rows) != (name, count)]
            rows += [replace(r, detail="another run") for r in old] + found
            given.out.write_text(
                json.dumps({"environment": environment(), "rows": [asdict(r) for r in rows]}, indent=1) + "\n"
            )
    return 0


if __name__ == "__main__":
    sys.exit(main())
