"""DRAM and L2 bytes of whole applications and of single kernels, by Nsight Compute, beside the plan's own count.

    python -m benchmarks.run.traffic                   all cases
    python -m benchmarks.run.traffic nerf_65536 block  some of them
    python -m benchmarks.run.traffic G1 G4 S2 --dsm    bytes into other SMs' shared memory instead
    python -m benchmarks.run.traffic --plan            on any machine: the plan's count alone, no counters

One call of every arm between profiler marks, in two states: *warm*, behind a call of the same, and *cold*, behind reads
of more than the L2 holds (reads, since lines that are written would be written back on the call's account). The
counters are the whole GPU's: a few processes compile side by side and count one at a time. Our plans are chosen by the
cost model (``measure=False``), since a time means nothing under the profiler. Clocks and caches are left alone; the
metrics fit one pass, so no kernel is replayed. Results go into what is in the file already. Needs an H100 or H200 and
``ncu``.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.lib.block_models import BLOCKS, Block
from benchmarks.lib.counted import DSM, METRICS, ranges
from benchmarks.lib.few_rows_workloads import WORKLOADS
from benchmarks.lib.places import RESULTS, module_command
from tilestream.apps.models import find
from tilestream.bench.environment import environment
from tilestream.ir.lengths import sizes_at
from tilestream.ir.mesh_traffic import mesh_traffic
from tilestream.ir.plain import plain
from tilestream.options import Options
from tilestream.plan.analyse import analyse
from tilestream.run.backend import tilestream

OUT = RESULTS / "traffic.json"
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "nerf_65536": ("nerf", {"rows": 65536}),
    "dlrm_2048": ("dlrm", {"batch": 2048, "max_rows": 100_000}),
    "mgn_2_steps": ("mgn", {"batch": 8, "steps": 2}),
    "graphcast_1_step": ("graphcast_small", {"steps": 1}),
}
KERNELS = {"block": 16384, **dict.fromkeys(WORKLOADS, 128)}
"""Rows of a block (norm, 768-3072-768, GELU, residual) and of the workloads of ``few_rows.py``."""
PROCESSES = (
    ("nerf_65536", "G4", "S2", "block"),
    ("mgn_2_steps", "G1", "G3"),
    ("dlrm_2048", "G5", "G6", "G8"),
    ("G10", "S1", "S3"),
    ("S4", "S5", "S7"),
    ("graphcast_1_step",),
)
"""Cases that share a process, of which as many as there are compile side by side."""
OURS = (("tilestream", "cold"), ("tilestream", "warm"))
EAGER = (("eager", "cold"),)
"""Of each case, in the order in which they are counted; eager's hundreds of kernels of whole applications alone."""
FLUSH_BYTES = 256 << 20


class Ffn(nn.Module):
    """One of ``few_rows_workloads.WORKLOADS``: [rows, k] to [rows, out]."""

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


def strategy(case: str) -> Literal["auto", "shared"]:
    """Workloads are one kernel in any case: by prediction a few are two of a library's."""
    return "shared" if case in WORKLOADS else "auto"


def planned(case: str) -> dict[str, Any]:
    """Bytes between DRAM and the chip by our own count: with what we plan, and with all on Inductor."""
    module, inputs = made(case, "meta")
    with torch.no_grad():
        found = analyse(module, inputs, Options(device="h200", strategy=strategy(case)))
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
        (runs,) = (region.runs for region in found.regions)
        assert runs is not None and runs.pipeline is not None
        written = plain(runs.pipeline)
        counts["levels"] = mesh_traffic(written, sizes_at(written, KERNELS[case]))
    return counts


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """No other process counts meanwhile."""
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def ranges_of(case: str) -> tuple[tuple[str, str], ...]:
    """Arms and states that are counted."""
    return OURS + EAGER if case in MODELS else OURS


def inside(cases: Sequence[str], folder: Path) -> None:
    """What runs under ``ncu``: ranges of every case, each of which begins with a kernel that sleeps."""
    flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
    for case in cases:
        module, inputs = made(case, "cuda")
        ours = torch.compile(
            module, dynamic=False, backend=tilestream, options={"measure": False, "strategy": strategy(case)}
        )
        with torch.no_grad():
            calls = {"tilestream": partial(ours, *inputs), "eager": partial(module, *inputs)}
            for call in calls.values():
                call()
            torch.cuda.synchronize()
            with alone(folder):
                for arm, state in ranges_of(case):
                    calls[arm]()
                    if state == "cold":
                        flush.sum()
                    torch.cuda.synchronize()
                    torch.cuda.profiler.start()
                    torch.cuda._sleep(1)
                    calls[arm]()
                    torch.cuda.synchronize()
                    torch.cuda.profiler.stop()


def counted(cases: Sequence[str], folder: Path, metrics: Mapping[str, str]) -> dict[str, Any]:
    """One process under ``ncu``: bytes by case, arm and state; or why there are none."""
    command = [
        *("ncu", "--profile-from-start", "off", "--clock-control", "none", "--cache-control", "none"),
        *("--target-processes", "application-only"),  # compilers' processes start sooner unseen
        *("--metrics", ",".join(metrics), "--csv", "--print-units", "base"),
        *(*module_command("run.traffic"), *cases, "--inside", str(folder)),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    found = ranges(done.stdout, metrics)
    wanted = [(case, arm, state) for case in cases for arm, state in ranges_of(case)]
    if len(found) != len(wanted):
        said = (done.stdout[:300] + done.stderr)[-1500:]
        return {case: {"problem": f"{len(found)} ranges were counted", "log": said} for case in cases}
    made: dict[str, Any] = {}
    for (case, arm, state), one in zip(wanted, found, strict=True):
        made.setdefault(case, {}).setdefault(arm, {})[state] = one
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join([*MODELS, *KERNELS])}")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--dsm", action="store_true")
    parser.add_argument("--plan", action="store_true")
    parser.add_argument("--inside", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    cases = given.cases or [*MODELS, *KERNELS]
    if given.inside:
        inside(cases, given.inside)
        return 0
    found: dict[str, Any] = {"schema": 1, "cases": {}}
    if given.out.exists():
        found = json.loads(given.out.read_text())

    def keep(new: Mapping[str, Any], key: str) -> None:
        for case, one in new.items():
            sizes = MODELS[case][1] if case in MODELS else {"rows": KERNELS[case]}
            found["cases"].setdefault(case, {"sizes": sizes})[key] = one
            print(case, key, json.dumps(one)[:1500], flush=True)
        given.out.write_text(json.dumps(found, indent=1) + "\n")

    if given.plan:
        keep({case: planned(case) for case in cases}, "planned")
        return 0
    found["environment"] = environment()
    groups = [own for group in PROCESSES if (own := [case for case in group if case in cases])]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(groups)) as pool:
        metrics = DSM if given.dsm else METRICS
        for run in as_completed([pool.submit(counted, group, Path(folder), metrics) for group in groups]):
            keep(run.result(), "dsm" if given.dsm else "counted")
    return 0


if __name__ == "__main__":
    sys.exit(main())
