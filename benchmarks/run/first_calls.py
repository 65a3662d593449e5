"""Time first calls of whole applications, each in a process of its own: with empty caches, and in later processes.

    python -m benchmarks.run.first_calls                        NeRF, MeshGraphNets, GraphCast
    python -m benchmarks.run.first_calls nerf_65536 --again 5   some, five processes with full caches
    python -m benchmarks.run.first_calls nerf_65536 --training  a training step: forward, sum, backward
    python -m benchmarks.run.first_calls mgn --profile          one process more, which shows where its time goes
    python -m benchmarks.run.first_calls swin-t --again 0       a whole model (lib/full_models.py)

A call is timed from ``torch.compile`` to its results; the model is made and both compilers' modules are loaded before
it. ``inductor`` and ``tilestream`` have a folder of caches each. ``capture`` is ``torch.compile(backend="aot_eager")``,
Dynamo and AOTAutograd alone, which is a part of both. A process before them leaves byte code behind. Needs an H100 or
H200. Results go to ``benchmarks/results/whole/first_*.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.full_models import EVERY
from benchmarks.lib.places import module_command
from benchmarks.lib.sampling import sampled
from benchmarks.run.whole_models import CASES, WHOLE, cache_folders, inference, training, write
from tilestream.apps.models import find
from tilestream.bench.environment import environment
from tilestream.run.backend import tilestream
from tilestream.run.stopwatch import spent

ARMS = ("tilestream", "inductor", "capture")
NAMES = (*CASES, *EVERY)
WANTED = ("nerf_65536", "mgn", "graphcast_small")
LEAST_PERCENT = 1.0


def first_call(arm: str, name: str, profile: bool, device: str, sizes: dict[str, Any], train: bool) -> dict[str, Any]:
    """Seconds of the first call in this process, and of that our parts."""
    if name in EVERY:
        module, inputs = EVERY[name].problem(device, tiny=device == "cpu")
    else:
        model, published = CASES[name]
        module, inputs = find(model).make(device=device, training=train, **{**published, **sizes})
    step = training if train else inference
    if device == "cuda":
        torch.cuda.synchronize()
    how: dict[str, Any] = {
        "inductor": {},
        "tilestream": {"backend": tilestream, "options": {"target": "auto" if device == "cuda" else "reference"}},
        "capture": {"backend": "aot_eager"},
    }[arm]

    def call() -> None:
        step(torch.compile(module, dynamic=False, **how), module, inputs)
        if device == "cuda":
            torch.cuda.synchronize()

    start, cpu = time.perf_counter(), time.process_time()
    if profile:
        with sampled() as tree:
            call()
        print("\n".join(tree.lines(LEAST_PERCENT)), file=sys.stderr)
    else:
        call()
    return {"s": time.perf_counter() - start, "cpu_s": time.process_time() - cpu, "parts_s": spent()}


def timed(name: str, arm: str, again: int, given: list[str]) -> dict[str, Any]:
    """First calls of an arm: cold, and ``again`` times with the caches that the cold one left."""
    with tempfile.TemporaryDirectory() as caches:
        environ = {**os.environ, **cache_folders(caches)}
        cold, *warm = (process(arm, name, environ, given) for _ in range(1 + again))
        if "--profile" in given:
            process(arm, name, environ, [*given, "--profiled"])
    found: dict[str, Any] = {"cold_s": cold["s"], "cold_parts_s": cold["parts_s"]}
    if warm:
        middle = sorted(warm, key=lambda w: w["s"])[len(warm) // 2]
        found |= {
            "second_process_s": statistics.median(w["s"] for w in warm),
            "second_processes_s": [w["s"] for w in warm],
            "second_process_cpu_s": statistics.median(w["cpu_s"] for w in warm),
            "second_process_parts_s": middle["parts_s"],
        }
    return found


def process(arm: str, name: str, environ: dict[str, str], given: list[str]) -> dict[str, Any]:
    """The first call in a process of its own.

    Raises:
        subprocess.CalledProcessError: the process failed; its own words are on stderr.
    """
    start = time.perf_counter()
    command = [*module_command("run.first_calls"), name, "--of", arm, *given]
    done = subprocess.run(command, env=environ, stdout=subprocess.PIPE, text=True, check=True)
    made = json.loads(done.stdout.splitlines()[-1])
    parts = ", ".join(f"{part} {seconds:.2f}" for part, seconds in made["parts_s"].items())
    whole = time.perf_counter() - start
    print(
        f"{name} {arm}: {made['s']:.2f} s, processor {made['cpu_s']:.2f} s ({parts}); process {whole:.1f} s", flush=True
    )
    return made


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"some of {', '.join(NAMES)}")
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--again", type=int, default=3, metavar="N", help="processes with full caches")
    parser.add_argument("--profile", action="store_true", help="one process more, sampled")
    parser.add_argument(
        "--byte-code", action=argparse.BooleanOptionalAction, default=True, help="a process before them"
    )
    parser.add_argument("--training", action="store_true", help="a training step, not inference")
    parser.add_argument("--cpu", action="store_true", help="our reference machine, on small sizes: no times to believe")
    parser.add_argument("--sizes", type=json.loads, default={}, metavar="JSON", help="sizes that differ")
    parser.add_argument("--of", choices=ARMS, help=argparse.SUPPRESS)
    parser.add_argument("--profiled", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=WHOLE)
    given = parser.parse_args()
    if unknown := [name for name in given.cases if name not in NAMES]:
        parser.error(f"no case is called {unknown[0]!r}; the cases are {', '.join(NAMES)}")
    device = "cpu" if given.cpu else "cuda"
    if device == "cuda" and not torch.cuda.is_available():
        print("no GPU: nothing to measure", file=sys.stderr)
        return 1
    if given.of:
        print(json.dumps(first_call(given.of, given.cases[0], given.profiled, device, given.sizes, given.training)))
        return 0
    child = ["--cpu"] * given.cpu + ["--sizes", json.dumps(given.sizes)] + ["--profile"] * given.profile
    child += ["--training"] * given.training
    suffix = "_training" if given.training else ""
    if given.byte_code:  # every module gets it before anything is timed
        with tempfile.TemporaryDirectory() as folder:
            process("tilestream", "nerf_16384", {**os.environ, **cache_folders(folder)}, ["--cpu"] * given.cpu)
    for name in given.cases or WANTED:
        made: dict[str, Any] = {"schema": 2, "model": name + suffix, "environment": environment(), "arms": {}}
        for arm in given.arms:
            made["arms"][arm] = timed(name, arm, given.again, child)
            write(f"first_{name}{suffix}", made, given.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
