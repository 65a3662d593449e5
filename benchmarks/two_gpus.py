"""Data-parallel training on two GPUs: how a step scales, and whether the gradients are the same.

    python benchmarks/two_gpus.py                   NeRF and MeshGraphNets
    python benchmarks/two_gpus.py nerf --out FILE   one of them; instead of benchmarks/results/two_gpus.json
    python benchmarks/two_gpus.py --arms tilestream eager    some arms, in this order; the file keeps the others
    python benchmarks/two_gpus.py mgn --gpus 1      one process: fills the compilers' caches for a run on two
    python benchmarks/two_gpus.py --dry-run         on the CPU, by gloo and on the reference machine

Each arm (eager, Inductor, tilestream) trains ``DistributedDataParallel`` around a batch of its own on every GPU, in a
process a GPU: forward, sum, backward with NCCL's all-reduce, as a plain loop without CUDA graphs. ``alone_us`` is the
same step on one GPU without the wrapper; scaling is the one over the other. ``graph_us`` is the step alone as a CUDA
graph: what its kernels take. Gradients are compared with the mean over both batches in float64. Needs two H100 or H200
of one host. Results are written after every arm.

Most of the time goes to compilers, which every process runs for itself, for the step with the wrapper and for the one
without: MeshGraphNets has 4 of its 15 equal steps here. A process sees its own GPU alone, so that all have the same
caches.
"""

from __future__ import annotations

import argparse
import json
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from tilestream.apps.models import find
from tilestream.bench.environment import environment
from tilestream.run import oracle, timing
from tilestream.run.backend import tilestream

OUT = Path(__file__).parent / "results" / "two_gpus.json"
CASES: dict[str, dict[str, Any]] = {"nerf": {"rows": 65536}, "mgn": {"batch": 8, "steps": 4}}
TINY: dict[str, dict[str, Any]] = {
    "nerf": {"rows": 64, "depth": 3, "width": 16, "skip": 1},
    "mgn": {"batch": 1, "nodes": 12, "edges": 40, "width": 16, "hidden": 1, "steps": 1},
}
"""Sizes of a dry run."""
ARMS: dict[str, dict[str, Any] | None] = {"eager": None, "inductor": {}, "tilestream": {"backend": tilestream}}
GPUS, ROUNDS, STEPS = 2, 7, 10
Row = dict[str, float]


@dataclass(frozen=True)
class Run:
    """What all processes are told: a port to meet at, cases and arms, how many processes they are, where results go,
    whether it is dry."""

    port: int
    names: tuple[str, ...]
    arms: tuple[str, ...]
    gpus: int
    out: str
    dry: bool

    @property
    def device(self) -> str:
        return "cpu" if self.dry else "cuda"

    def sizes(self, name: str) -> dict[str, Any]:
        return (TINY if self.dry else CASES)[name]

    def ended(self) -> None:
        """Wait for the GPU."""
        if not self.dry:
            torch.cuda.synchronize()


def compiled(module: nn.Module, how: dict[str, Any] | None) -> nn.Module:
    return module if how is None else torch.compile(module, dynamic=False, **how)  # type: ignore[return-value]


def step(function: Callable[..., Any], module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """One step without an optimizer: the gradients of the mean of all results."""
    module.zero_grad(set_to_none=True)
    results = [y for y in pytree.tree_leaves(function(*inputs)) if y.is_floating_point()]
    torch.stack([y.float().square().mean() for y in results]).sum().backward()


def step_us(run: Run, call: Callable[[], None]) -> float:
    """Median microseconds a step, all processes in step."""
    samples = []
    for _ in range(1 if run.dry else ROUNDS):
        dist.barrier()
        run.ended()
        start = time.perf_counter()
        for _ in range(STEPS):
            call()
        run.ended()
        samples.append((time.perf_counter() - start) / STEPS * 1e6)
    return statistics.median(samples)


def mean_gradients(module: nn.Module, inputs: tuple[Tensor, ...], processes: int) -> list[Tensor]:
    """In float64: this process's gradients, then their mean over the processes."""
    wide = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    before = {n: p.detach().clone() for n, p in module.named_parameters()}
    module.double()
    with oracle.Float64():
        step(module, module, wide)
    made = [p.grad.clone() for p in module.parameters() if p.grad is not None]
    module.to(torch.bfloat16)
    with torch.no_grad():
        for name, p in module.named_parameters():
            p.copy_(before[name])
    for grad in made:
        dist.all_reduce(grad)
    return [grad / processes for grad in made]


def arm_of(run: Run, arm: str, module: nn.Module, inputs: tuple[Tensor, ...], exact: list[Tensor]) -> Row:
    """One arm's times, and the error of its gradients."""
    torch.compiler.reset()
    how = ARMS[arm]
    if run.dry and how:
        how = {**how, "options": {"target": "reference"}}
    shared, single = deepcopy(module), deepcopy(module)  # the wrapper leaves hooks on its parameters
    both = compiled(DistributedDataParallel(shared, device_ids=None if run.dry else [0]), how)
    alone = compiled(single, how)
    start = time.perf_counter()
    step(both, shared, inputs)
    run.ended()
    row: Row = {"first_step_s": time.perf_counter() - start}
    grads = [p.grad for p in shared.parameters() if p.grad is not None]
    row["error"] = max(oracle.error(g, e) for g, e in zip(grads, exact, strict=True))
    step(alone, single, inputs)
    run.ended()
    row["first_steps_s"] = time.perf_counter() - start
    row["alone_us"] = step_us(run, lambda: step(alone, single, inputs))
    row["both_us"] = step_us(run, lambda: step(both, shared, inputs))
    row["scaling"] = run.gpus * row["alone_us"] / row["both_us"]
    try:
        if not run.dry:
            row["graph_us"] = timing.timed_side_by_side([lambda: step(alone, single, inputs)])[0]
    except RuntimeError as error:  # the other times stand
        print(f"{arm} is no CUDA graph: {error}", flush=True)
    return row


def task(run: Run, rank: int, name: str) -> tuple[nn.Module, tuple[Tensor, ...], list[Tensor]]:
    """A case's model, with the same weights everywhere, a batch of this process's own, and the exact gradients."""
    module, inputs = find(name).make(device=run.device, training=True, seed=0, **run.sizes(name))
    torch.manual_seed(100 + rank)
    inputs = tuple(torch.randn_like(x) if x.is_floating_point() else x for x in inputs)
    return module, inputs, mean_gradients(module, inputs, run.gpus)


def keep(run: Run, name: str, arm: str, row: Row) -> None:
    """Write an arm's row beside those that are in the file."""
    path = Path(run.out)
    found: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {}
    case = found.setdefault(name, {"arms": {}})
    case |= {"sizes": run.sizes(name), "gpus": run.gpus, "environment": environment()}
    case["arms"][arm] = row
    case["arms"] = {known: case["arms"][known] for known in ARMS if known in case["arms"]}
    path.write_text(json.dumps(found, indent=1) + "\n")


def of_process(rank: int, run: Run) -> None:
    """What one process does; the first one writes the results."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(run.port)}
    dist.init_process_group("gloo" if run.dry else "nccl", rank=rank, world_size=run.gpus)
    tasks = {name: task(run, rank, name) for name in run.names}
    for arm, (name, own) in product(run.arms, tasks.items()):
        row = arm_of(run, arm, *own)
        if rank == 0:
            print(name, arm, {k: round(v, 5) for k, v in row.items()}, flush=True)
            keep(run, name, arm, row)
    dist.barrier()
    dist.destroy_process_group()


def started(run: Run) -> int:
    """Start the processes, each with its own GPU to see, and wait for them; one that fails ends the others."""
    all_ = os.environ.get("CUDA_VISIBLE_DEVICES") or ",".join(map(str, range(run.gpus)))
    processes = []
    for rank, own in enumerate(all_.split(",")[: run.gpus]):
        os.environ["CUDA_VISIBLE_DEVICES"] = own  # read when CUDA starts, which imports may do
        processes.append(get_context("spawn").Process(target=of_process, args=(rank, run)))
        processes[-1].start()
    while any(p.is_alive() for p in processes) and not any(p.exitcode for p in processes):
        time.sleep(0.2)
    for p in processes:
        if p.is_alive() and any(other.exitcode for other in processes):
            p.terminate()
        p.join()
    return max(abs(p.exitcode or 0) for p in processes)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--gpus", type=int, default=GPUS)
    parser.add_argument("--dry-run", action="store_true")
    given = parser.parse_args()
    if not given.dry_run and torch.cuda.device_count() < given.gpus:
        print(f"{torch.cuda.device_count()} GPUs are visible; this needs {given.gpus} of one host", file=sys.stderr)
        return 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    run = Run(port, tuple(given.cases), tuple(given.arms), given.gpus, str(given.out), given.dry_run)
    return started(run)


if __name__ == "__main__":
    sys.exit(main())
