"""Data-parallel training on two GPUs: how a step scales, and whether the gradients are the same.

    python benchmarks/two_gpus.py                   NeRF and MeshGraphNets
    python benchmarks/two_gpus.py nerf --out FILE   one of them; instead of benchmarks/results/two_gpus.json

Each arm (eager, Inductor, tilestream) trains ``DistributedDataParallel`` around a batch of its own on every GPU, in a
process a GPU: forward, sum, backward with NCCL's all-reduce, as a plain loop without CUDA graphs. ``alone_us`` is the
same step on one GPU without the wrapper; scaling is the one over the other. Gradients are compared with the mean over
both batches in float64. Needs two H100 or H200 of one host.
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
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel
from torch.utils import _pytree as pytree

from tilestream.apps.models import find
from tilestream.bench.environment import environment
from tilestream.run import oracle
from tilestream.run.backend import tilestream

OUT = Path(__file__).parent / "results" / "two_gpus.json"
CASES: dict[str, dict[str, Any]] = {"nerf": {"rows": 65536}, "mgn": {"batch": 8}}
ARMS: dict[str, dict[str, Any] | None] = {"eager": None, "inductor": {}, "tilestream": {"backend": tilestream}}
GPUS, ROUNDS, STEPS = 2, 7, 10


def compiled(module: nn.Module, how: dict[str, Any] | None) -> nn.Module:
    return module if how is None else torch.compile(module, dynamic=False, **how)  # type: ignore[return-value]


def step(function: Callable[..., Any], module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
    """One step without an optimizer: the gradients of the mean of all results."""
    module.zero_grad(set_to_none=True)
    results = [y for y in pytree.tree_leaves(function(*inputs)) if y.is_floating_point()]
    torch.stack([y.float().square().mean() for y in results]).sum().backward()


def step_us(run: Callable[[], None]) -> float:
    """Median microseconds a step, both processes in step."""
    samples = []
    for _ in range(ROUNDS):
        dist.barrier()
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(STEPS):
            run()
        torch.cuda.synchronize()
        samples.append((time.perf_counter() - start) / STEPS * 1e6)
    return statistics.median(samples)


def mean_gradients(module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
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
    return [grad / GPUS for grad in made]


def of_process(rank: int, port: int, names: tuple[str, ...], out: str) -> None:
    """What one process does; the first one writes the results."""
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", rank=rank, world_size=GPUS)
    found: dict[str, Any] = {}
    for name in names:
        module, inputs = find(name).make(device="cuda", training=True, seed=0, **CASES[name])
        torch.manual_seed(100 + rank)  # the same weights everywhere, and a batch of its own
        inputs = tuple(torch.randn_like(x) if x.is_floating_point() else x for x in inputs)
        exact = mean_gradients(module, inputs)
        row: dict[str, Any] = {}
        for arm, how in ARMS.items():
            torch.compiler.reset()
            shared, single = deepcopy(module), deepcopy(module)  # the wrapper leaves hooks on its parameters
            both = compiled(DistributedDataParallel(shared, device_ids=[rank]), how)
            alone = compiled(single, how)
            start = time.perf_counter()
            step(both, shared, inputs)
            torch.cuda.synchronize()
            first_s = time.perf_counter() - start
            grads = [p.grad for p in shared.parameters() if p.grad is not None]
            error = max(oracle.error(g, e) for g, e in zip(grads, exact, strict=True))
            step(alone, single, inputs)
            row[arm] = {
                "first_step_s": first_s,
                "error": error,
                "alone_us": step_us(lambda: step(alone, single, inputs)),  # noqa: B023
                "both_us": step_us(lambda: step(both, shared, inputs)),  # noqa: B023
            }
            row[arm]["scaling"] = GPUS * row[arm]["alone_us"] / row[arm]["both_us"]
            if rank == 0:
                print(name, arm, {k: round(v, 5) for k, v in row[arm].items()}, flush=True)
        found[name] = {"sizes": CASES[name], "gpus": GPUS, "arms": row, "environment": environment()}
    if rank == 0:
        Path(out).write_text(json.dumps(found, indent=1) + "\n")
    dist.barrier()
    dist.destroy_process_group()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(CASES), help=f"of {', '.join(CASES)}")
    parser.add_argument("--out", type=Path, default=OUT)
    given = parser.parse_args()
    if torch.cuda.device_count() < GPUS:
        print(f"{torch.cuda.device_count()} GPUs are visible; this needs {GPUS} of one host", file=sys.stderr)
        return 2
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    spawn(of_process, (port, tuple(given.cases), str(given.out)), nprocs=GPUS)
    return 0


if __name__ == "__main__":
    sys.exit(main())
