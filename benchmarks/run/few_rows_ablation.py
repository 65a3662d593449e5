"""What each part of a kernel for few rows is worth: FlashFuser's ablation, and one of transports, tails and rings.

    python -m benchmarks.run.few_rows_ablation               G4, G8, S2 and the small ones, 128 rows
    python -m benchmarks.run.few_rows_ablation G4 --rows 16
    python -m benchmarks.run.few_rows_ablation --seconds 60  what ends in time; shapes of earlier runs are kept
    python -m benchmarks.run.few_rows_ablation --dry-run     which kernels would be timed; needs no GPU

Arms: ``planner``, the kernels that the search times, the best of which it takes; ``random``, kernels drawn among all
that fit, always the same; ``middle by cluster``, of those whose middle goes through DSM the best by prediction of
each tail and size of a cluster; ``tail ...``, the best few of each tail with the middle through the L2; ``stages of
N``, the best kernel's grid with other depths of a ring stage. Values of every kernel are checked as in ``few_rows.py``,
which times them.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

from benchmarks.lib.budget import Budget
from benchmarks.lib.few_rows_workloads import WORKLOADS
from benchmarks.lib.places import RESULTS
from benchmarks.run import few_rows
from tilestream import cuda, devices
from tilestream.bench.environment import environment
from tilestream.errors import VerifyError
from tilestream.kernels.fits import verify_on
from tilestream.kernels.product.finder import find_block
from tilestream.kernels.product.shared_tile import Tail, build
from tilestream.kernels.product.shared_tile.cost import shared_tile_cost
from tilestream.kernels.product.shared_tile.model import DEPTHS
from tilestream.kernels.product.sharing import Middle
from tilestream.options import Options
from tilestream.plan import margins
from tilestream.plan.few_rows import best_splits
from tilestream.plan.passes.share_tile import Allowed, Split, share_tile, splits

OUT = RESULTS / "few_rows_ablation.json"
NAMES = ("G1", "G3", "G4", "G8", "G10", "S2")
DRAWN = 9
GUESS_S = 25.0
"""Until one shape was timed."""
TAILS = {Tail.PARTIALS: "in order", Tail.REDUCE_ADD: "any order", Tail.CLUSTER: "by cluster", Tail.NONE: "one group"}


@dataclass(frozen=True)
class Arm:
    """A kernel as part of an arm; one kernel may be of several."""

    workload: str
    rows: int
    arm: str
    split: str
    warm_us: float
    cold_us: float
    error: float


def ranked(name: str, rows: int) -> list[Split]:
    """All splits that fit the H200, best first by prediction, those whose middle goes over a cluster among them."""
    device = devices.get("h200")
    program = few_rows.program(WORKLOADS[name])
    stage = share_tile(program, Split(1, 1, Tail.NONE))
    block = find_block(stage.stages[0], stage)
    found: list[tuple[float, Split]] = []
    for split in splits(block, rows, device, Allowed(True, True, thorough=True)):
        try:
            made = share_tile(program, split, device)
            verify_on(made, device)
            schedule = build(made.stages[0], made, device.shared_bytes_per_cta)
        except VerifyError:
            continue
        found.append((shared_tile_cost(schedule, rows, device).seconds, split))
    return [split for _, split in sorted(found, key=lambda each: each[0])]


def arms(name: str, rows: int) -> dict[str, list[Split]]:
    """Arm to the kernels whose times it is made of: the best of them, of ``random`` the median."""
    program, some = few_rows.program(WORKLOADS[name]), ranked(name, rows)
    full = [s for s in some if s.middle is Middle.L2 and s.depth is None]
    found = best_splits(program, rows, devices.get("h200"), Options(any_order=True))
    made = {"planner": found, "random": random.Random(0).sample(some, min(DRAWN, len(some)))}
    gathered = [s for s in some if s.middle is Middle.DSM and s.depth is None]
    made["middle by cluster"] = list({(s.tail, s.columns): s for s in reversed(gathered)}.values())
    for tail, said in TAILS.items():
        made[f"tail {said}"] = [s for s in full if s.tail is tail][: margins.SHARED_EACH]
    best = next(s for s in made["planner"] if s.middle is Middle.L2)
    for depth in DEPTHS:
        made[f"stages of {depth}"] = [s for s in some if s == replace(best, depth=depth)]
    return {name: kernels for name, kernels in made.items() if kernels}


def timed(name: str, rows: int) -> Iterator[Arm]:
    """Every kernel of every arm, timed once and side by side."""
    wanted = arms(name, rows)
    kernels = list(dict.fromkeys(s for some in wanted.values() for s in some))
    found = {r.arm: r for r in few_rows.workload(name, WORKLOADS[name], rows, few_rows.Wanted(False, False), kernels)}
    for arm, some in wanted.items():
        for split in some:
            row = found.get(f"shared {split}")
            if row is not None:
                yield Arm(name, rows, arm, str(split), row.warm_us, row.cold_us, row.error)
    for other in ("eager", "addmm_activation"):
        if other in found:
            yield Arm(name, rows, "library", other, found[other].warm_us, found[other].cold_us, found[other].error)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(NAMES))
    parser.add_argument("--rows", type=int, nargs="+", default=[128])
    parser.add_argument("--seconds", type=float, default=float("inf"), help="leave out what would end later")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    made: list[Arm] = []
    if given.out.exists():
        made = [Arm(**row) for row in json.loads(given.out.read_text(encoding="utf-8"))["rows"]]
    budget = Budget(given.seconds)
    torch.set_grad_enabled(False)
    for name in given.names:
        for rows in given.rows:
            if given.dry_run:
                for arm, some in arms(name, rows).items():
                    print(f"{name}, {rows} rows, {arm}: {'; '.join(map(str, some))}")
                continue
            if reason := cuda.available():
                print(reason)
                return 1
            if not budget.affords("shape", GUESS_S):
                print(f"{name}, {rows} rows: left out, {budget.left_s:.0f} s are left", flush=True)
                continue
            with budget.step("shape"):
                found = list(timed(name, rows))
            made = [a for a in made if (a.workload, a.rows) != (name, rows)] + found
            text = json.dumps({"environment": environment(), "rows": [asdict(a) for a in made]}, indent=1)
            given.out.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
