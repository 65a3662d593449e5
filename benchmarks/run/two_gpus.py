"""Data-parallel training on two GPUs: how a step scales, and whether the gradients are the same.

    python -m benchmarks.run.two_gpus                          NeRF and MeshGraphNets
    python -m benchmarks.run.two_gpus nerf --out FILE          one of them; instead of benchmarks/results/two_gpus.json
    python -m benchmarks.run.two_gpus --arms tilestream eager  some arms, in this order; the file keeps the others
    python -m benchmarks.run.two_gpus mgn --ways ddp once --no-wrapped --no-collectives --seconds 55  what takes least
    python -m benchmarks.run.two_gpus --dry-run                on the CPU, by gloo and on the reference machine

Each arm (eager, Inductor, tilestream) trains on a batch of its own on every GPU: forward, sum, backward, and the mean
of the gradients. ``alone_us`` is the step on one GPU as a plain loop, ``graph_us`` as a CUDA graph: what its kernels
take; ``alone_us_each`` and ``graph_us_each`` have every GPU's. Of the same compiled model ``ways`` has steps with an
exchange (``exchanges.py``), each as a loop and some as CUDA graphs, NCCL's kernels among them: what of the scaling is
left where the host is not the limit. ``whole`` among them is ``DistributedDataParallel`` compiled as a whole, which
Dynamo cuts where a bucket is full. Scaling is two GPUs' throughput over the first one's, loop by loop and graph by
graph. Gradients are compared with the mean over both batches in float64. Needs two H100 or H200 of one host.

An arm has a process a GPU (``two_gpus_arm.py``) and caches of its own, empty at first, which its processes share. All
arms compile side by side; what compilers choose by is timed in turns. Then every piece of work is asked of one arm
after another, the others idle. What is found is written after every piece, and printed with the seconds since the
start. MeshGraphNets has 4 of its 15 equal steps here. This process imports no torch, so that the others start at once.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import socket
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from benchmarks.lib.places import RESULTS

OUT = RESULTS / "two_gpus.json"
CASES: dict[str, dict[str, Any]] = {"nerf": {"rows": 65536}, "mgn": {"batch": 8, "steps": 4}}
TINY: dict[str, dict[str, Any]] = {
    "nerf": {"rows": 64, "depth": 3, "width": 16, "skip": 1},
    "mgn": {"batch": 1, "nodes": 12, "edges": 40, "width": 16, "hidden": 1, "steps": 1},
}
"""Sizes of a dry run."""
ARMS = ("eager", "inductor", "tilestream")
WAYS = ("ddp", "view", "hook", "once")
CAPTURED = ("view", "once")
"""Ways that are timed as CUDA graphs, too."""
CACHES = ("TILESTREAM_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "CUDA_CACHE_PATH")
GPUS = 2
PIECE_S = 25.0
"""An arm that takes longer for a piece of work but compilation is given up: its processes wait for each other."""
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What all processes of an arm are told: a port to meet at, the arm, how many processes they are, where turns are
    taken, whether it is dry, when the benchmark started, how many compilers of Inductor's each may start."""

    port: int
    arm: str
    gpus: int = GPUS
    folder: str = ""
    dry: bool = False
    start_s: float = field(default_factory=time.time)
    compilers: int = 1

    def sizes(self, name: str) -> dict[str, Any]:
        return (TINY if self.dry else CASES)[name]

    def say(self, words: str) -> None:
        print(f"{time.time() - self.start_s:5.1f} s  {self.arm}: {words}\n", end="", flush=True)  # in one piece


def of_process(rank: int, run: Run, parent: Connection) -> None:
    from benchmarks.run.two_gpus_arm import serve

    serve(rank, run, parent)


class Arm:
    """The processes of an arm, each with its own GPU to see, and our ends of their pipes."""

    def __init__(self, run: Run) -> None:
        self.run, self.processes, self.ends, self.row = run, [], [], {}
        seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(run.gpus)))
        context = get_context("spawn")
        own = {} if run.dry else {name: f"{run.folder}/{run.arm}/{name}" for name in CACHES}
        for folder in own.values():
            Path(folder).mkdir(parents=True)
        own["TORCHINDUCTOR_COMPILE_THREADS"] = str(run.compilers)
        for rank, gpu in enumerate(seen.split(",")[: run.gpus]):
            with _environment(own | {"CUDA_VISIBLE_DEVICES": gpu}):  # read when CUDA starts, which imports may do
                end, theirs = context.Pipe()
                self.processes.append(context.Process(target=of_process, args=(rank, run, theirs), daemon=True))
                self.processes[-1].start()
                theirs.close()
                self.ends.append(end)

    def end(self, patience_s: float = 0.0) -> None:
        _tell(self.ends, "end")
        for process in self.processes:
            process.join(patience_s)
            process.terminate()


class _environment:
    """What processes that are started inside find in their environment."""

    def __init__(self, variables: Mapping[str, str]) -> None:
        self._variables = variables

    def __enter__(self) -> None:
        self._before = dict(os.environ)
        os.environ.update(self._variables)

    def __exit__(self, *_: object) -> None:
        os.environ.clear()
        os.environ.update(self._before)


def pieces(ways: Sequence[str], collectives: bool = True) -> list[str]:
    """What is asked of an arm that has compiled, in order: captured exchanges last, since one that fails leaves NCCL in
    doubt."""
    words = ["alone", "graph", *ways, *(f"{way} graph" for way in ways if way in CAPTURED)]
    return words + ["collectives"] * collectives


def measure(
    runs: Sequence[Run],
    stages: Mapping[str, Sequence[str]],
    names: Sequence[str],
    out: Path,
    patience_s: float = math.inf,
    seconds: float = math.inf,
) -> int:
    """Ask every case's stages of the arms: a stage's name of all at once, then its pieces of one after another.

    Args:
        patience_s: after which nothing more is asked of an arm that still compiles; since the start.
        seconds: after which no piece is begun; since the start.

    Returns:
        How many arms failed or were late.
    """
    arms = [Arm(run) for run in runs]
    left = list(arms)
    for name in names:
        for arm in left:
            arm.row = {}
        for stage, words in stages.items():
            left = _asked(left, name, stage, out, patience_s)
            for word in words:
                for arm in list(left):
                    if _since(arm.run) > seconds:
                        arm.run.say(f"{word}: no time is left")
                    elif not _asked([arm], name, word, out, _since(arm.run) + PIECE_S):
                        left.remove(arm)
    for arm in left:
        _tell(arm.ends, "end")
    for arm in left:
        arm.end(5.0)
    return len(arms) - len(left)


def _since(run: Run) -> float:
    return time.time() - run.start_s


def _asked(arms: Sequence[Arm], name: str, word: str, out: Path, until_s: float) -> list[Arm]:
    """Have the arms do what a word of a case says, and keep what they found; those that did, the others are ended."""
    done = []
    for arm in arms:
        _tell(arm.ends, f"{word} {name}")
    for arm in arms:
        told = _answers(arm.ends, arm.run.start_s + until_s)
        if told is None:
            arm.run.say(f"{name}, {word}: failed or late; it is given up")
            continue
        found = together(told)
        environment = found.pop("environment", None)
        arm.run.say(f"{name}, {word}: {json.dumps(found)}")
        merge(arm.row, found)
        keep(out, name, arm.run, scaled(arm.row, arm.run.gpus), environment)
        done.append(arm)
    for arm in arms:
        if arm not in done:
            arm.end()
    return done


def together(told: Sequence[Row]) -> Row:
    """What the first process says, of times alone what each took, and plans that differ: processes of one arm tune by
    themselves, and a step with an exchange waits for the slower."""
    first = {key: value for key, value in told[0].items() if key != "plans"}
    for key in ("first_step_s", "alone_us", "graph_us"):
        if all(each := [one.get(key) for one in told]):
            first[f"{key}_each"] = each
    if plans := told[0].get("plans"):
        first["plans_apart"] = {
            region: [one["plans"].get(region) for one in told]
            for region, chosen in plans.items()
            if any(one["plans"].get(region) != chosen for one in told)
        }
    return first


def merge(row: Row, found: Mapping[str, Any]) -> None:
    """Add what was found, ways and what is in them by themselves."""
    for key, value in found.items():
        if isinstance(value, dict) and isinstance(row.get(key), dict):
            merge(row[key], value)
        else:
            row[key] = value


def scaled(row: Row, gpus: int) -> Row:
    """The row with throughputs of all GPUs over one's: loops over the loop, graphs over the graph."""
    for made in row.get("ways", {}).values():
        if "us" in made:
            made["scaling"] = gpus * row["alone_us"] / made["us"]
        if row.get("graph_us") and made.get("graph_us"):
            made["graph_scaling"] = gpus * row["graph_us"] / made["graph_us"]
    return row


def keep(out: Path, name: str, run: Run, row: Row, environment: Row | None = None) -> None:
    """Write an arm's row beside those that are in the file."""
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    case = found.setdefault(name, {"arms": {}})
    case |= {"sizes": run.sizes(name), "gpus": run.gpus}
    case |= {"environment": environment} if environment else {}
    case["arms"][run.arm] = row
    case["arms"] = {known: case["arms"][known] for known in ARMS if known in case["arms"]}
    partial = out.with_suffix(".part")
    partial.write_text(json.dumps(found, indent=1) + "\n")
    partial.replace(out)


def _tell(ends: Iterable[Connection], word: str) -> None:
    with suppress(OSError):  # of a process that has failed; what it does not answer says so
        for end in ends:
            end.send(word)


def _answers(ends: Sequence[Connection], until_s: float = math.inf) -> list[Any] | None:
    """One from each process; None where one has failed, for which the others may wait in vain, or it is too late.

    Args:
        until_s: by ``time.time``.
    """
    told: dict[Connection, Any] = {}
    try:
        while len(told) < len(ends):
            left_s = None if until_s == math.inf else max(0.0, until_s - time.time())
            some = wait([end for end in ends if end not in told], left_s)
            if not some:
                return None
            told |= {end: end.recv() for end in some}  # type: ignore[union-attr]
    except (EOFError, OSError):
        return None
    return [told[end] for end in ends]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--no-wrapped", action="store_true")
    parser.add_argument("--no-collectives", action="store_true")
    parser.add_argument("--patience", type=float, default=math.inf, help="seconds, for what still compiles then")
    parser.add_argument("--seconds", type=float, default=math.inf, help="after which nothing more is begun")
    parser.add_argument("--gpus", type=int, default=GPUS)
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    stages = {"compile": pieces(given.ways, not given.no_collectives)}
    stages |= {} if given.no_wrapped else {"wrap": ["whole"]}
    start_s, compilers = time.time(), max(2, 2 * len(os.sched_getaffinity(0)) // (len(given.arms) * given.gpus))
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        runs = [Run(_free_port(), arm, given.gpus, folder, given.dry_run, start_s, compilers) for arm in given.arms]
        return measure(runs, stages, given.cases, given.out, given.patience, given.seconds)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
