"""Feed-forward blocks on few rows: shared tiles against the best of eager, fused cuBLAS, Inductor and max-autotune.

    python -m benchmarks.run.few_rows                                            FlashFuser's G and S workloads
    python -m benchmarks.run.few_rows G4 S2 --planner                            torch.compile(backend="tilestream") too
    python -m benchmarks.run.few_rows G4 --rows 1 16 64 128
    python -m benchmarks.run.few_rows --planner --side-by-side FOLDER --seconds 60  a process each, what ends in time
    python -m benchmarks.run.few_rows --cutlass libcutlass_examples.so           beside CUTLASS (cutlass_examples.py)

bf16, random data; every arm a CUDA graph, all arms of a workload in turn, medians. ``warm`` repeats one set of weights;
``cold`` goes round sets that are together over twice the L2. Errors are against float64; results are poisoned with NaN
before each check, and deterministic kernels must give the same bits twice.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from math import ceil
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch._inductor import config as inductor_config
from torch._inductor.fx_passes import b2b_gemm

from benchmarks.lib import cutlass_examples
from benchmarks.lib.few_rows_workloads import WORKLOADS, Workload, chosen_splits
from benchmarks.lib.places import RESULTS, module_command
from benchmarks.lib.turns import Turns
from tilestream import cuda
from tilestream.bench.environment import environment
from tilestream.errors import TilestreamError
from tilestream.ir.pipeline import Pipeline
from tilestream.ir.plain import plain
from tilestream.ir.verify import verify
from tilestream.kernels.product.shared_tile import build
from tilestream.kernels.product.shared_tile.model import TILES
from tilestream.plan.passes.share_tile import Split, share_tile
from tilestream.run import prepare
from tilestream.run.backend import tilestream
from tilestream.run.timing import capture, interleaved
from tilestream.studies.flashfuser import generated
from tilestream.studies.flashfuser.dataflow.chain import Chain, Gate

ROUNDS = 15
MOST_B2B_BYTES = 20_000_000
"""Larger ones would take milliseconds: one CTA has all hidden columns of its rows."""
COLD_BYTES = 140e6
"""Of all sets of weights together: over twice the L2."""
TUNERS, COMPILERS = 5, 1
"""Workers of Inductor's that compile in a process with max-autotune, and without, where processes are side by side."""


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
        count = max(2, ceil(COLD_BYTES / w.weight_bytes))

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


@dataclass(frozen=True)
class Wanted:
    """Which arms there are beside eager, cuBLAS and splits by hand.

    Attributes:
        compiled: Inductor, and its ``b2b_gemm_pass`` forced.
        tuned: max-autotune too, which takes most of the time of a run.
        planner: ``torch.compile`` with us, sums in one order and in any.
        dependent: splits with programmatic dependent launch too.
        cutlass: the library of CUTLASS's examples.
    """

    compiled: bool = True
    tuned: bool = True
    planner: bool = False
    dependent: bool = False
    cutlass: Path | None = None


UNDISTURBED = Turns()
PLANNERS: dict[str, dict[str, Any]] = {"tilestream": {}, "tilestream, any order": {"any_order": True}}


def block(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """The feed-forward block that all compile."""
    u = F.linear(x, up)
    h = F.relu(u) if gate is None else F.silu(F.linear(x, gate)) * u
    return F.linear(h, down)


def on(data: Data, function: Callable[..., torch.Tensor]) -> Run:
    """``function`` as a function of which weights."""
    return lambda n: function(data.x, data.sets[n]["up"], data.sets[n]["down"], data.sets[n].get("gate"))


def library(w: Workload, data: Data, wanted: Wanted) -> dict[str, Run]:
    """Everything that there is without us, as a function of which weights."""

    def other(x: torch.Tensor, up: torch.Tensor, down: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
        return block(x, up, down, gate)  # a function of its own, so that it is compiled under its own settings

    arms = {"eager": on(data, block)}
    if not w.gated:
        zero = torch.zeros(w.hid, device="cuda", dtype=torch.bfloat16)
        relu_of = torch.ops.aten._addmm_activation.default
        arms["addmm_activation"] = lambda n: F.linear(
            relu_of(zero, data.x, data.sets[n]["up"].t()), data.sets[n]["down"]
        )
    if wanted.compiled:
        torch._dynamo.reset()
        arms["inductor"] = on(data, torch.compile(block, dynamic=False))
        if wanted.tuned:
            arms["max-autotune"] = on(data, torch.compile(block, dynamic=False, mode="max-autotune-no-cudagraphs"))
        if not w.gated and w.weight_bytes < MOST_B2B_BYTES:
            with back_to_back():  # it compiles in here
                forced = running(
                    {"b2b_gemm forced": on(data, torch.compile(other, dynamic=False))}
                )  # compiles, in here
            arms |= forced if counters["inductor"]["b2b_gemm"] else {}
    if wanted.cutlass is not None and data.x.shape[0] == TILES[-1]:
        arms |= cutlass_examples.arms(wanted.cutlass, data.x, data.sets)
    return arms


def running(arms: dict[str, Run]) -> dict[str, Run]:
    """Those whose first call, which compiles, ends well; of others it is said why they are left out."""
    found = {}
    for arm, run in arms.items():
        try:
            run(0)
            found[arm] = run
        except Exception as error:  # whatever a compiler of others raises costs its arm alone
            print(f"  {arm} is left out: {type(error).__name__}: {str(error)[:300]}", flush=True)
    return found


def planned(data: Data, options: dict[str, Any]) -> tuple[dict[str, Run], dict[str, str]]:
    """``torch.compile`` with us, and what was chosen. Plans of other ``options`` are not taken: kernels are."""
    arms, details = {}, {}
    for arm, more in PLANNERS.items():
        arms[arm] = on(data, torch.compile(block, dynamic=False, backend=tilestream, options={**more, **options}))
        arms[arm](0)
        plan = prepare.analyses()[-1].plan
        details[arm] = plan.chosen.name if plan is not None else prepare.analyses()[-1].problem
    return arms, details


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


class Shared:
    """A shared tile by hand, as a function of which weights."""

    def __init__(self, w: Workload, data: Data, split: Split, dependent: bool = False) -> None:
        pipeline = share_tile(program(w), split)
        verify(pipeline)
        written = plain(pipeline)
        self._schedule = build(written.stages[0], written)
        kernel = cuda.build(pipeline, dependent=dependent)
        rows = data.x.shape[0]
        self._y = torch.empty(rows, w.out, device="cuda", dtype=torch.bfloat16)
        self._bound = [kernel.bind({"x": data.x, **s}, rows, ("y",)) for s in data.sets]

    def __call__(self, n: int) -> torch.Tensor:
        self._bound[n]((self._y,))
        return self._y

    def __str__(self) -> str:
        s = self._schedule
        return f"{s.middle_columns} + {s.out_columns} columns, {s.left_stages} + {s.weight_stages} stages of {s.depth}"


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
    for make, calls in ((lambda run: lambda: run(0), 40), (turning, sets * ceil(24 / sets))):
        # Of every arm as many calls: what a replay takes besides them is little, and of all arms the same.
        captured = [capture(make(run), 1e9, calls) for run in arms.values()]
        for name, samples in zip(arms, interleaved(captured, ROUNDS), strict=True):
            found.setdefault(name, []).append(statistics.median(samples))
    return {name: (warm, cold) for name, (warm, cold) in found.items()}


def workload(
    name: str, w: Workload, rows: int, wanted: Wanted, splits: Sequence[Split], turns: Turns = UNDISTURBED
) -> list[Row]:
    """Every arm of a workload, checked and timed; those that are wrong are left out, and said."""
    with turns.compiling():
        data = Data.random(w, rows)
        arms = library(w, data, wanted)
        arms |= by_hand(name, w, data, wanted, splits)
        arms = running(arms)
        if wanted.planner and turns.folder is not None:  # compiles: what is timed meanwhile is not used
            planned(data, {"cache_dir": turns.folder / name})
    with turns.alone():
        details = {arm: str(run) for arm, run in arms.items() if isinstance(run, Shared)}
        if wanted.planner:
            planners, chosen = planned(data, {"cache": False})
            arms, details = arms | planners, details | chosen
        exact = [data.exact(w, n) for n in range(2)]
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


def by_hand(name: str, w: Workload, data: Data, wanted: Wanted, splits: Sequence[Split]) -> dict[str, Run]:
    """Kernels of ``splits``, those that fit, built side by side."""
    cuda.start([share_tile(program(w), s) for s in splits])
    arms: dict[str, Run] = {}
    for split in splits:
        try:
            arms[f"shared {split}"] = Shared(w, data, split)
            if wanted.dependent:
                arms[f"shared {split}, dependent launch"] = Shared(w, data, split, dependent=True)
        except TilestreamError as error:
            print(f"  {name} {split}: {error}", flush=True)
    return arms


def side_by_side(words: Sequence[str], names: Sequence[str], folder: Path, seconds: float) -> list[Path]:
    """Each workload by a process of its own, all begun at once: they compile side by side and are timed in turn.
    Those that have not ended after ``seconds`` are ended. What the others wrote."""
    folder.mkdir(parents=True, exist_ok=True)
    end_s = time.monotonic() + seconds
    tuned = "--untuned" not in words
    env = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": str(TUNERS if tuned else COMPILERS)}
    made = {name: folder / f"{name}.json" for name in names}
    running = []
    for name, out in made.items():
        command = [*module_command("run.few_rows"), name, *words, "--turns", str(folder), "--out", str(out)]
        running.append(subprocess.Popen(command, env=env))
    for process in running:
        try:
            process.wait(max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.kill()
    return [out for out in made.values() if out.exists()]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(WORKLOADS)}; all")
    parser.add_argument("--rows", type=int, nargs="+", default=[128])
    parser.add_argument("--no-compile", action="store_true", help="eager and cuBLAS alone")
    parser.add_argument("--planner", action="store_true", help="torch.compile with tilestream too")
    parser.add_argument("--untuned", action="store_true", help="no max-autotune, which takes most of the time")
    parser.add_argument("--dependent", action="store_true", help="programmatic dependent launch too")
    parser.add_argument("--cutlass", type=Path, help="the library that cutlass_examples.py compiles: its arms too")
    parser.add_argument("--side-by-side", type=Path, help="a process a workload, with locks and results in this folder")
    parser.add_argument("--seconds", type=float, default=3600.0, help="end what takes longer, side by side")
    parser.add_argument(
        "--patience",
        type=float,
        default=60.0,
        help="seconds after which those that still compile are not waited for, side by side",
    )
    parser.add_argument("--turns", type=Path, help="the folder of locks that processes side by side share")
    parser.add_argument("--merge", type=Path, nargs="*", default=[], help="add these results, and time nothing")
    parser.add_argument("--out", type=Path, default=RESULTS / "few_rows.json")
    given = parser.parse_args(words)
    names = given.names or list(WORKLOADS)
    if unknown := sorted(set(names) - set(WORKLOADS)):
        parser.error(f"no shape is known of {', '.join(unknown)}; there are {', '.join(WORKLOADS)}")
    if given.side_by_side:
        passed = ["--rows", *map(str, given.rows), "--patience", str(given.patience)]
        passed += [f"--{flag}" for flag in ("no-compile", "planner", "untuned", "dependent") if flag_of(given, flag)]
        passed += ["--cutlass", str(given.cutlass)] if given.cutlass else []
        given.merge = side_by_side(passed, names, given.side_by_side, given.seconds)
    if given.merge or given.side_by_side:
        for part in given.merge:
            data = json.loads(part.read_text())
            keep(given.out, [Row(**row) for row in data["rows"]], data["environment"])
        return 0
    torch.set_grad_enabled(False)
    wanted = Wanted(not given.no_compile, not given.untuned, given.planner, given.dependent, given.cutlass)
    for name in names:
        for count in given.rows:
            turns = Turns(given.turns, given.patience)
            found = workload(name, WORKLOADS[name], count, wanted, chosen_splits(name, count), turns)
            keep(given.out, found, environment())
    return 0


def flag_of(given: argparse.Namespace, flag: str) -> bool:
    return getattr(given, flag.replace("-", "_"))


def keep(out: Path, found: Sequence[Row], made_in: dict[str, object]) -> None:
    """Write ``found`` to ``out``, beside rows of other workloads and other numbers of rows that it has. What
    max-autotune took in another run is kept where it was not run now, and says so."""
    rows = [Row(**row) for row in json.loads(out.read_text())["rows"]] if out.exists() else []
    cases = {(r.workload, r.rows) for r in found}
    tuned = {(r.workload, r.rows) for r in found if r.arm == "max-autotune"}
    old = [r for r in rows if (r.workload, r.rows) in cases - tuned and r.arm == "max-autotune"]
    rows = [r for r in rows if (r.workload, r.rows) not in cases]
    rows += [replace(r, detail="another run") for r in old] + list(found)
    text = json.dumps({"environment": made_in, "rows": [asdict(r) for r in rows]}, indent=1)
    out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
