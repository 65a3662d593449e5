"""DRAM and L2 bytes of whole applications and of single kernels, by Nsight Compute, beside the plan's own count.

    python benchmarks/traffic.py                     all cases, each in a process of its own, side by side
    python benchmarks/traffic.py nerf_65536 block    some of them
    python benchmarks/traffic.py G4 S2 --dsm         bytes into other SMs' shared memory instead; into traffic_dsm.json
    python benchmarks/traffic.py --dry-run           on any machine: the plan's count alone, no counters

One call of every arm between profiler marks, in two states: *warm*, behind a call of the same, and *cold*, behind reads
of more than the L2 holds (reads, since lines that are written would be written back on the call's account). The
counters are the whole GPU's: processes compile side by side, and count one after another. Our plans are chosen by the
cost model (``measure=False``), since a time means nothing under the profiler. Clocks and caches are left alone; the
metrics fit one pass, so no kernel is replayed. Needs an H100 or H200 and ``ncu``.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import torch
from block_models import BLOCKS, Block
from counted import DSM, METRICS, ranges
from few_rows import WORKLOADS
from torch import Tensor, nn
from torch.nn import functional
from whole_models import compiled

from tilestream.apps.models import find
from tilestream.bench.environment import environment
from tilestream.ir.axes import ROWS
from tilestream.ir.mesh_traffic import mesh_traffic
from tilestream.ir.plain import plain
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.run.backend import tilestream

OUT = Path(__file__).parent / "results" / "traffic.json"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "nerf_65536": ("nerf", {"rows": 65536}),
    "dlrm_2048": ("dlrm", {"batch": 2048, "max_rows": 100_000}),
    "mgn_4_steps": ("mgn", {"batch": 8, "steps": 4}),
}
KERNELS = {"block": 16384, "G4": 128, "S2": 128}
"""Rows of a block (norm, 768-3072-768, GELU, residual) and of two of the workloads of ``few_rows.py``."""
ARMS = ("tilestream", "inductor", "eager")
STATES = ("warm", "cold")
FLUSH_BYTES = 256 << 20
WAIT_S = 60.0
"""For the other processes to be compiled, or to have counted."""


class Ffn(nn.Module):
    """One of ``few_rows.WORKLOADS``: [rows, k] to [rows, out]."""

    def __init__(self, name: str) -> None:
        super().__init__()
        w = WORKLOADS[name]
        self.up, self.down = nn.Linear(w.k, w.hid, bias=False), nn.Linear(w.hid, w.out, bias=False)
        self.gate = nn.Linear(w.k, w.hid, bias=False) if w.gated else None

    def forward(self, x: Tensor) -> Tensor:
        u = self.up(x)
        return self.down(functional.relu(u) if self.gate is None else functional.silu(self.gate(x)) * u)


def made(case: str, device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A case's module, in inference, and its inputs."""
    if case in MODELS:
        model, sizes = MODELS[case]
        return find(model).make(device=device, **sizes)
    with torch.device(device):
        module = Block(BLOCKS["gpt2"]) if case == "block" else Ffn(case)
        x = torch.randn(KERNELS[case], module.up.in_features)
    return module.bfloat16().eval().requires_grad_(False), (x.bfloat16(),)


def planned(case: str) -> dict[str, Any]:
    """Bytes between DRAM and the chip by our own count: with what we plan, and with all on Inductor."""
    module, inputs = made(case, "meta")
    with torch.no_grad():
        found = analyse(module, inputs, Options(device="h200"))
    launches = [
        {"name": launch.name, "strategy": launch.strategy, "bytes": launch.bytes} for launch in found.whole.launches
    ]
    inductor = sum(launch.bytes for launch in found.on_inductor.launches)
    counts: dict[str, Any] = {
        "tilestream": sum(launch["bytes"] for launch in launches),
        "inductor": inductor,
        "launches": launches,
    }
    if case in KERNELS:
        (runs,) = (region.runs("cuda") for region in found.regions)
        assert runs is not None and runs.pipeline is not None
        written = plain(runs.pipeline)
        counts["levels"] = mesh_traffic(written, {**written.sizes(), ROWS.name: KERNELS[case]})
    return counts


def turn(folder: Path, case: str, order: list[str], ending: str) -> None:
    """Say that this process is ``ending``, and wait until all are, or those before it; not for ever."""
    awaited = order if ending == "ready" else order[: order.index(case)]
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s and not all((folder / f"{name}.{ending}").exists() for name in awaited):
        time.sleep(0.05)


def inside(case: str, folder: Path, order: list[str]) -> None:
    """What runs under ``ncu``: each arm in each state is a range, which begins with a kernel that sleeps."""
    module, inputs = made(case, "cuda")
    flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    calls = []
    with torch.no_grad():
        for arm in ARMS:
            torch.compiler.reset()
            function = (
                torch.compile(module, dynamic=False, backend=tilestream, options={"measure": False})
                if arm == "tilestream"
                else compiled(arm, module)
            )
            calls.append(partial(function, *inputs))
            calls[-1]()
        torch.cuda.synchronize()
        (folder / f"{case}.ready").touch()
        turn(folder, case, order, "ready")
        turn(folder, case, order, "done")
        for call in calls:
            for state in STATES:
                call()
                if state == "cold":
                    flush.sum()
                torch.cuda.synchronize()
                torch.cuda.profiler.start()
                torch.cuda._sleep(1)
                call()
                torch.cuda.synchronize()
                torch.cuda.profiler.stop()
    (folder / f"{case}.done").touch()


def counted(case: str, folder: Path, order: list[str], metrics: Mapping[str, str]) -> dict[str, Any]:
    """One process under ``ncu``: bytes of every arm in every state, or why there are none."""
    command = [
        *("ncu", "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none"),
        *("--metrics", ",".join(metrics), "--csv", "--print-units", "base"),
        *(sys.executable, __file__, case, "--inside", str(folder), "--order", *order),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    (folder / f"{case}.ready").touch()
    (folder / f"{case}.done").touch()
    found = ranges(done.stdout, metrics)
    if len(found) != len(ARMS) * len(STATES):
        return {"problem": f"{len(found)} ranges were counted", "log": (done.stdout + done.stderr)[-1500:]}
    names = [(arm, state) for arm in ARMS for state in STATES]
    made: dict[str, Any] = {}
    for (arm, state), one in zip(names, found, strict=True):
        made.setdefault(arm, {})[state] = one
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join([*MODELS, *KERNELS])}")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--dsm", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--order", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    cases = given.cases or [*MODELS, *KERNELS]
    if given.inside:
        inside(cases[0], given.inside, given.order)
        return 0
    metrics = DSM if given.dsm else METRICS
    out = given.out or OUT.with_stem("traffic_dsm" if given.dsm else "traffic")
    found: dict[str, Any] = {"schema": 1, "environment": environment(), "cases": {}}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(cases)) as pool:
        runs = {} if given.dry_run else {c: pool.submit(counted, c, Path(folder), cases, metrics) for c in cases}
        for case in cases:
            sizes = MODELS[case][1] if case in MODELS else {"rows": KERNELS[case]}
            found["cases"][case] = {"sizes": sizes, "planned": planned(case)}
        for case, run in runs.items():
            found["cases"][case]["counted"] = run.result()
            out.write_text(json.dumps(found, indent=1) + "\n")
            print(case, json.dumps(found["cases"][case]["counted"])[:2000], flush=True)
    out.write_text(json.dumps(found, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
