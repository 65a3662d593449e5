"""Data-parallel training on two GPUs: how a step scales, and whether the gradients are the same.

    python benchmarks/two_gpus.py                   NeRF and MeshGraphNets
    python benchmarks/two_gpus.py nerf --out FILE   one of them; instead of benchmarks/results/two_gpus.json
    python benchmarks/two_gpus.py --arms tilestream eager    some arms, in this order; the file keeps the others
    python benchmarks/two_gpus.py mgn --ways view once --no-wrapped    some ways to exchange; what compiles least
    python benchmarks/two_gpus.py --dry-run         on the CPU, by gloo and on the reference machine

Each arm (eager, Inductor, tilestream, and tilestream that leaves 4 SMs to NCCL, which takes no more) trains on a batch
of its own on every GPU: forward, sum, backward, and the mean of the gradients. ``alone_us`` is the step on one GPU as a
plain loop, ``graph_us`` as a CUDA graph: what its kernels take. Of the same compiled model ``ways`` has steps with an
exchange (``exchanges.py``), each as a loop and some as CUDA graphs, NCCL's kernels among them: what of the scaling is
left where the host is not the limit. ``both_us`` is ``DistributedDataParallel`` compiled as a whole, which Dynamo cuts
where a bucket is full. Scaling is two GPUs' throughput over one's, loop by loop and graph by graph. Gradients are
compared with the mean over both batches in float64. Needs two H100 or H200 of one host.

An arm has a process a GPU, and all arms compile side by side; what compilers choose by is timed in turns, and so are
the steps: one arm at a time. MeshGraphNets has 4 of its 15 equal steps here. Results are written after every arm.
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
from collections.abc import Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from exchanges import CAPTURED, WAYS, exchanging, step
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from turns import Turns
from two_gpus_times import Clock, collectives

from tilestream.apps.models import find
from tilestream.bench.environment import environment
from tilestream.run import oracle
from tilestream.run.backend import tilestream

OUT = Path(__file__).parent / "results" / "two_gpus.json"
CASES: dict[str, dict[str, Any]] = {"nerf": {"rows": 65536}, "mgn": {"batch": 8, "steps": 4}}
TINY: dict[str, dict[str, Any]] = {
    "nerf": {"rows": 64, "depth": 3, "width": 16, "skip": 1},
    "mgn": {"batch": 1, "nodes": 12, "edges": 40, "width": 16, "hidden": 1, "steps": 1},
}
"""Sizes of a dry run."""
SPARED = 4
"""SMs. Of 132 it leaves 128, among which rows of a power of two are dealt out as evenly."""
ARMS: dict[str, dict[str, Any] | None] = {
    "eager": None,
    "inductor": {},
    "tilestream": {"backend": tilestream},
    "spared": {"backend": tilestream, "options": {"spare_sms": SPARED}},
}
GPUS = 2
Row = dict[str, Any]


@dataclass(frozen=True)
class Run:
    """What all processes of an arm are told: a port to meet at, the arm, cases, how many processes they are, ways to
    exchange, whether the wrapped model is compiled too, where turns are taken, whether it is dry."""

    port: int
    arm: str
    names: tuple[str, ...]
    gpus: int = GPUS
    ways: tuple[str, ...] = WAYS
    wrapped: bool = True
    folder: str = ""
    dry: bool = False

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    @property
    def how(self) -> dict[str, Any] | None:
        """Keywords of ``torch.compile``; None of eager."""
        how = ARMS[self.arm]
        return {**how, "options": {"target": "reference", **how.get("options", {})}} if self.dry and how else how

    def compiled(self, module: nn.Module) -> nn.Module:
        return module if self.how is None else torch.compile(module, dynamic=False, **self.how)  # type: ignore[return-value]

    def meet(self, rank: int) -> None:
        """Join the arm's process group; NCCL has as many channels as SMs are left to it."""
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port)}
        options = None
        if not self.dry:
            options = dist.ProcessGroupNCCL.Options()
            if self.arm == "spared":
                options.config.max_ctas = SPARED
        dist.init_process_group("gloo" if self.dry else "nccl", rank=rank, world_size=self.gpus, pg_options=options)


def sizes(name: str, dry: bool) -> dict[str, Any]:
    return (TINY if dry else CASES)[name]


def mean_gradients(module: nn.Module, inputs: tuple[Tensor, ...], processes: int) -> list[Tensor]:
    """In float64: this process's gradients, then their mean over the processes."""
    wide = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    exact = deepcopy(module).double()
    with oracle.Float64():
        step(exact, exact, wide)
    made = [p.grad for p in exact.parameters() if p.grad is not None]
    for grad in made:
        dist.all_reduce(grad)
    return [grad / processes for grad in made]


class Task:
    """A case as one arm's process has it: the same weights everywhere, a batch of its own, the exact gradients."""

    def __init__(self, run: Run, rank: int, name: str) -> None:
        self.run, self.clock = run, Clock(run.dry)
        self.module, inputs = find(name).make(device=run.device, training=True, seed=0, **sizes(name, run.dry))
        torch.manual_seed(100 + rank)
        self.inputs = tuple(torch.randn_like(x) if x.is_floating_point() else x for x in inputs)
        self.exact = mean_gradients(self.module, self.inputs, run.gpus)

    def error(self, module: nn.Module) -> float:
        """Of the gradients that ``module`` holds."""
        grads = [p.grad for p in module.parameters() if p.grad is not None]
        return max(oracle.error(g, e) for g, e in zip(grads, self.exact, strict=True))

    def compile(self, wrapped: bool) -> Row:
        """Make and call the model that is timed next."""
        torch.compiler.reset()  # else a wrapped model and a plain one run what was compiled for the first of them
        self.own = deepcopy(self.module)  # the wrapper leaves hooks on its parameters
        on = None if self.run.dry else [0]
        self.function = self.run.compiled(DistributedDataParallel(self.own, device_ids=on) if wrapped else self.own)
        start = time.perf_counter()
        step(self.function, self.own, self.inputs)
        self.clock.ended()
        return {"first_wrapped_s" if wrapped else "first_step_s": time.perf_counter() - start}

    def times(self, wrapped: bool) -> Row:
        """What the arm is asked for, while no other uses the GPUs."""
        call = lambda: step(self.function, self.own, self.inputs)  # noqa: E731
        if wrapped:
            return {"both_us": self.clock.loop_us(call), "error": self.error(self.own)}
        row: Row = {"alone_us": self.clock.loop_us(call), "graph_us": self.clock.graph_us(call), "ways": {}}
        for way in self.run.ways:
            with exchanging(way, self.function, self.own, self.inputs) as call:
                made: Row = {"us": self.clock.loop_us(call)}
                made["error"] = self.error(self.own)
                if way == self.run.ways[0] and not self.run.dry:
                    row["collectives"] = collectives(call)
            row["ways"][way] = made
        for way in (w for w in self.run.ways if w in CAPTURED):  # last: a capture that fails leaves NCCL in doubt
            with exchanging(way, self.function, self.own, self.inputs, captured=True) as call:
                row["ways"][way]["graph_us"] = self.clock.graph_us(call)
        return row


def of_process(rank: int, run: Run, parent: Connection) -> None:
    """What a process does: compile, say so, wait for its turn, and send what it found; a case and a form at a time."""
    if run.dry:
        torch.set_num_threads(1)
    else:
        Turns(Path(run.folder) / f"turn{rank}").take_part()
    run.meet(rank)
    for name in run.names:
        task = Task(run, rank, name)
        for wrapped in (False, True)[: 1 + run.wrapped]:
            made = task.compile(wrapped)
            parent.send("ready")
            parent.recv()
            parent.send(made | task.times(wrapped))
            parent.recv()  # the other arms' turns are over: what comes next uses the GPUs
    dist.destroy_process_group()


def scaled(row: Row, gpus: int) -> Row:
    """The row with throughputs of all GPUs over one's: loops over the loop, graphs over the graph."""
    if "both_us" in row and "alone_us" in row:
        row["scaling"] = gpus * row["alone_us"] / row["both_us"]
    for made in row.get("ways", {}).values():
        made["scaling"] = gpus * row["alone_us"] / made["us"]
        if row.get("graph_us") and made.get("graph_us"):
            made["graph_scaling"] = gpus * row["graph_us"] / made["graph_us"]
    return row


def keep(out: Path, name: str, arm: str, row: Row, gpus: int = GPUS, dry: bool = False) -> None:
    """Write an arm's row beside those that are in the file."""
    found: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {}
    case = found.setdefault(name, {"arms": {}})
    case |= {"sizes": sizes(name, dry), "gpus": gpus, "environment": environment()}
    case["arms"][arm] = row
    case["arms"] = {known: case["arms"][known] for known in ARMS if known in case["arms"]}
    out.write_text(json.dumps(found, indent=1) + "\n")


def started(runs: Sequence[Run]) -> dict[str, tuple[list[Any], list[Connection]]]:
    """The processes of all arms, each with its own GPU to see, and our ends of their pipes."""
    seen = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(runs[0].gpus)))
    context, arms = get_context("spawn"), {}
    for run in runs:
        processes, ends = [], []
        for rank, own in enumerate(seen.split(",")[: run.gpus]):
            os.environ["CUDA_VISIBLE_DEVICES"] = own  # read when CUDA starts, which imports may do
            end, theirs = context.Pipe()
            processes.append(context.Process(target=of_process, args=(rank, run, theirs), daemon=True))
            processes[-1].start()
            theirs.close()
            ends.append(end)
        arms[run.arm] = processes, ends
    return arms


def in_turn(runs: Sequence[Run], out: Path, until_s: float = math.inf) -> int:
    """Let the arms compile side by side and take times one after another; how many of them failed or were not ready
    ``until_s``, of which nothing further is asked."""
    arms, rows = started(runs), {}
    left = [run.arm for run in runs]
    for name in runs[0].names:
        for _ in range(1 + runs[0].wrapped):
            ready = [arm for arm in left if _answers(arms[arm][1], until_s) is not None]
            left = []
            for arm in ready:
                row = rows.setdefault((name, arm), {})
                if not _measure(arms[arm][1], row):
                    continue
                left.append(arm)
                print(name, arm, json.dumps(scaled(row, runs[0].gpus)), flush=True)
                keep(out, name, arm, row, runs[0].gpus, runs[0].dry)
            for arm, (processes, ends) in arms.items():
                _tell(ends, "next")
                for process in processes if arm not in left else ():
                    process.terminate()
    for processes, _ in arms.values():
        for process in processes:
            process.join()
    return len(arms) - len(left)


def _measure(ends: Sequence[Connection], row: Row) -> bool:
    """Have an arm take its times, and add those of its first process to the row; whether it did."""
    _tell(ends, "go")
    told = _answers(ends)
    row |= told[0] if told else {}
    return told is not None


def _tell(ends: Sequence[Connection], word: str) -> None:
    with suppress(OSError):  # of a process that has failed; what it does not answer says so
        for end in ends:
            end.send(word)


def _answers(ends: Sequence[Connection], until_s: float = math.inf) -> list[Any] | None:
    """One from each process; None where one has failed, for which the others may wait in vain, or it is too late."""
    told: dict[Connection, Any] = {}
    try:
        while len(told) < len(ends):
            left_s = None if until_s == math.inf else max(0.0, until_s - time.monotonic())
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
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--no-wrapped", action="store_true")
    parser.add_argument("--patience", type=float, default=math.inf, help="seconds, for what still compiles then")
    parser.add_argument("--gpus", type=int, default=GPUS)
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    if not given.dry_run and torch.cuda.device_count() < given.gpus:
        print(f"{torch.cuda.device_count()} GPUs are visible; this needs {given.gpus} of one host", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as folder:
        runs = [
            Run(
                _free_port(), arm, tuple(given.cases), given.gpus, tuple(given.ways), not given.no_wrapped, folder,
                given.dry_run,
            )
            for arm in given.arms
        ]  # fmt: skip
        return in_turn(runs, given.out, time.monotonic() + given.patience)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
