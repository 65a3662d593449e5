"""Train NeRF, MeshGraphNets and DLRM to a loss, eager beside ours: mean and spread over seeds.

    python -m benchmarks.run.losses                                1,000 steps, three seeds, on a GPU
    python -m benchmarks.run.losses nerf --arms tilestream --json a.json one arm, as a process beside the others
    python -m benchmarks.run.losses --join a.json b.json --json losses.json
    python -m benchmarks.run.losses --device cpu --tiny --steps 4  a dry run on the reference machine

bf16, Adam (fused on a GPU, where a step is a CUDA graph, compiled once for all seeds). A run goes through 100 batches
of features again and again, on one graph, or of lookups in other combinations of the same rows; targets are what
another initialisation of the same model makes of them (``learning.py``). All arms see the same. A loss is the mean over
the last twentieth of the steps. Runs divide what is left of ``--seconds``, compiling included; one that takes more than
its part ends early and says so. Results are written after every run.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.run.learning import CASES, RATE, Run, Step, arms, task, train
from tilestream.bench.environment import environment


@dataclass(frozen=True)
class Trained:
    """A case and an arm: the mean of where its seeds end, and their standard deviation."""

    case: str
    arm: str
    mean: float
    spread: float
    runs: tuple[Run, ...]


Kept = Callable[[Trained], None]


def summary(case: str, arm: str, runs: Sequence[Run]) -> Trained:
    ends = [run.end for run in runs]
    return Trained(case, arm, statistics.fmean(ends), statistics.stdev(ends) if len(ends) > 1 else 0.0, tuple(runs))


def within_noise(one: Trained, other: Trained) -> bool:
    """Whether two means differ by at most twice the standard error of their difference."""
    error = math.sqrt((one.spread**2 + other.spread**2) / len(one.runs))
    return abs(one.mean - other.mean) <= 2 * error


def trained(case: str, names: Sequence[str], args: argparse.Namespace, end_s: float, keep: Kept) -> None:
    """Train every arm from every seed by ``end_s``; ``keep`` is called after each run with the arm's runs so far."""
    learned = task(case, args.tiny, args.device)
    left = len(names) * args.seeds
    for arm in arms(learned, names):
        begin = time.perf_counter()
        run = Step(arm, learned)
        print(f"{case} {arm.name}: ready after {time.perf_counter() - begin:.1f} s", flush=True)
        runs: list[Run] = []
        for seed in range(args.seeds):
            share = (end_s - time.perf_counter()) / left
            runs.append(train(arm, run, learned, seed, args.steps, share))
            keep(summary(case, arm.name, runs))
            left -= 1


def outcome(found: Sequence[Trained], steps: int) -> str:
    """Lines: where each arm ends, and whether the last is where the first is."""
    lines = []
    for made in found:
        least = min(run.steps for run in made.runs)
        cut = "" if least == steps else f" (stopped after {least} steps)"
        lines.append(f"{made.case} {made.arm}: {made.mean:.5f} +- {made.spread:.5f}{cut}")
    for case in dict.fromkeys(made.case for made in found):
        first, *_, last = [made for made in found if made.case == case] * 2
        if first.arm != last.arm and len(first.runs) == len(last.runs):
            same = "within noise" if within_noise(first, last) else "apart"
            lines.append(f"{case}: {first.arm} and {last.arm} are {same}")
    return "\n".join(lines)


def written(path: Path, found: Sequence[Trained], steps: int, where: dict[str, Any]) -> None:
    sizes = {made.case: CASES[made.case][1] for made in found}
    made = {"schema": 1, "environment": where, "steps": steps, "rate": RATE, "sizes": sizes}
    path.write_text(json.dumps({**made, "trained": [asdict(t) for t in found]}, indent=1) + "\n")


def joined(paths: Sequence[Path]) -> list[Trained]:
    """What several processes wrote, eager first, in the order of the cases."""
    rows = [row for path in paths for row in json.loads(path.read_text())["trained"]]
    made = [Trained(**{**row, "runs": tuple(Run(**run) for run in row["runs"])}) for row in rows]
    order = ("eager", "inductor", "tilestream")
    return sorted(made, key=lambda t: (list(CASES).index(t.case), order.index(t.arm)))


def main(given: Sequence[str] | None = None) -> list[Trained]:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--arms", nargs="+", default=["eager", "tilestream"], help="of eager, inductor, tilestream")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=1440, help="for all, from now on")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes of a dry run")
    parser.add_argument("--json", type=Path, help="write the runs here too")
    parser.add_argument("--join", nargs="+", type=Path, help="train nothing: the results of other processes")
    args = parser.parse_args(given)
    end_s = time.perf_counter() + args.seconds
    found: dict[tuple[str, str], Trained] = {}
    where = environment()

    def keep(made: Trained) -> None:
        found[made.case, made.arm] = made
        if args.json:
            written(args.json, list(found.values()), args.steps, where)

    if args.join:
        where = json.loads(args.join[0].read_text())["environment"]
        for made in joined(args.join):
            keep(made)
    else:
        cases = args.cases or list(CASES)
        for index, case in enumerate(cases):
            now = time.perf_counter()
            trained(case, args.arms, args, now + (end_s - now) / (len(cases) - index), keep)
    print(outcome(list(found.values()), args.steps), flush=True)
    return list(found.values())


if __name__ == "__main__":
    main()
