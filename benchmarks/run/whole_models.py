"""Time whole applications, as ``torch.compile`` runs them: eager, Inductor, tilestream; inference and a training step.

    python -m benchmarks.run.whole_models                      all of them
    python -m benchmarks.run.whole_models mgn dlrm_2048        some of them
    python -m benchmarks.run.whole_models --training nerf_65536  a training step: forward, sum, backward
    python -m benchmarks.run.whole_models --host               a plain loop without CUDA graphs, by parts
    python -m benchmarks.run.whole_models --max-autotune ...   that arm too, which takes minutes to compile
    python -m benchmarks.run.whole_models --library ...        eager and Inductor alone, with the kernels that each runs
    python -m benchmarks.run.whole_models --warm ...           with the caches of the environment, no first calls

Needs an H100 or H200. bf16, random data; the protocol is CONTRIBUTING's: CUDA graphs in every arm, rounds interleaved,
medians. ``first_call_s`` is the call that compiles, with empty caches of Inductor's, Triton's and ours, in a process
that has compiled the arms before it. Errors are against eager. Results go to ``benchmarks/results/whole``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.lib import graph_models
from benchmarks.lib.graph_models import PREFIX
from benchmarks.lib.places import RESULTS
from tilestream.apps.load import load
from tilestream.apps.models import find
from tilestream.bench import host
from tilestream.bench.environment import environment
from tilestream.options import Options
from tilestream.plan.parts import RegionAnalysis
from tilestream.run import oracle, prepare, timing
from tilestream.run.backend import tilestream
from tilestream.run.stopwatch import spent
from tilestream.run.whole import wholes

WHOLE = RESULTS / "whole"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "nerf_16384": ("nerf", {"rows": 16384}),
    "nerf_65536": ("nerf", {"rows": 65536}),
    "nerf_262144": ("nerf", {"rows": 262144}),
    "dlrm_2048": ("dlrm", {"batch": 2048, "max_rows": 100_000}),
    "dlrm_32768": ("dlrm", {"batch": 32768, "max_rows": 100_000}),
    "mgn": ("mgn", {"batch": 8}),
    "mgn_200000": ("mgn", {"batch": 18}),
    "graphcast_small": ("graphcast_small", {"steps": 4}),
    "graphcast_small_16": ("graphcast_small", {}),
    "llama_layer": ("llama_prefill+sdpa", {"layers": 1, "layers_only": True}),
    "llama_decode_1": ("llama_decode+sdpa", {"layers": 1, "layers_only": True}),
    "llama_decode_16": ("llama_decode+sdpa", {"layers": 1, "layers_only": True, "batch": 16}),
    "qwen3_decode": (
        "llama_decode+sdpa",
        {"batch": 1, "context": 255, "layers": 4, "layers_only": True, "width": 1024, "hidden": 3072, "heads": 16}
        | {"kv_heads": 8, "head_features": 128, "head_norms": True},
    ),
}
GRAPHS: dict[str, tuple[str, dict[str, Any]]] = {
    f"{model}{'' if dtype == 'bf16' else '_f32'}": (
        f"pyg_{model}",
        {"width": width, "layers": layers, "nodes": nodes, "edges": edges, "dtype": dtype},
    )
    for model, width, layers, nodes, edges, dtypes in (
        ("gin", 64, 5, 100_000, 1_000_000, ("bf16", "f32")),
        ("sage", 128, 3, 100_000, 1_000_000, ("bf16", "f32")),
        ("gcn", 128, 3, 100_000, 1_000_000, ("bf16",)),
        ("gat", 128, 2, 100_000, 1_000_000, ("bf16",)),
        ("edge_conv", 64, 2, 65_536, 1_048_576, ("bf16",)),
    )
    for dtype in dtypes
}
"""Models of PyTorch Geometric (``graph_models.py``), which needs to be there."""
CASES |= GRAPHS
HOST = (("nerf", 16384), ("nerf", 256), ("meshgraphnets", 32768), ("classifier", 1024), ("policy_value", 64))
ARMS = ("eager", "inductor", "inductor_max_autotune", "tilestream")


def compiled(arm: str, module: nn.Module) -> Callable[..., Any]:
    """The module as an arm runs it."""
    if arm == "eager":
        return module
    how: dict[str, Any] = {
        "inductor": {},
        "inductor_max_autotune": {"mode": "max-autotune-no-cudagraphs"},
        "tilestream": {"backend": tilestream},
    }[arm]
    return torch.compile(module, dynamic=False, **how)


def inference(function: Callable[..., Any], module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    with torch.no_grad():
        return pytree.tree_leaves(function(*inputs))


def training(function: Callable[..., Any], module: nn.Module, inputs: tuple[Tensor, ...]) -> list[Tensor]:
    """One step without an optimizer: the gradients of a loss, or of the sum of all results."""
    module.zero_grad(set_to_none=True)
    results = [y for y in pytree.tree_leaves(function(*inputs)) if y.is_floating_point()]
    if len(results) == 1 and not results[0].dim():  # a loss
        results[0].backward()
        return [p.grad for p in module.parameters() if p.grad is not None]
    torch.stack([y.sum() for y in results]).sum().backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


def model_of(model: str, sizes: Mapping[str, Any], train: bool, device: str) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """A case's module and inputs."""
    if model.startswith(PREFIX):
        return graph_models.make(model.removeprefix(PREFIX), device=device, **sizes)
    return find(model).make(device=device, training=train, **sizes)


def measured(name: str, train: bool, arms: tuple[str, ...]) -> dict[str, Any]:
    """Times, first calls and errors of one case."""
    model, sizes = CASES[name]
    module, inputs = model_of(model, sizes, train, "cuda")
    return {"schema": 1, "model": model, "sizes": sizes, **timed(module, inputs, train, arms)}


def timed(module: nn.Module, inputs: tuple[Tensor, ...], train: bool, arms: tuple[str, ...]) -> dict[str, Any]:
    """The same of any module."""
    step = training if train else inference
    made: dict[str, Any] = {"training": train, "environment": environment()}
    calls: dict[str, Callable[[], object]] = {}
    found: dict[str, list[Tensor]] = {}
    made["arms"] = {}
    graphs, regions = len(wholes()), len(prepare.analyses())
    for arm in arms:
        torch.compiler.reset()
        function = compiled(arm, module)
        before = spent()
        torch.cuda.synchronize()
        start = time.perf_counter()
        results = step(function, module, inputs)
        torch.cuda.synchronize()
        seconds = time.perf_counter() - start
        found[arm] = [x.detach().clone() for x in results]
        calls[arm] = partial(step, function, module, inputs)
        made["arms"][arm] = {"first_call_s": seconds}
        if arm == "tilestream":
            made["arms"][arm]["parts_s"] = {k: v - before.get(k, 0.0) for k, v in spent().items()}
    for arm, results in found.items():
        pairs = zip(results, found["eager"], strict=True)
        made["arms"][arm]["difference"] = max(oracle.error(a, b.double()) for a, b in pairs)
    del found
    if train:
        module.zero_grad(set_to_none=True)
    for arm, us in zip(calls, timing.timed_side_by_side(list(calls.values())), strict=True):
        made["arms"][arm]["us"] = us
    if "tilestream" in made["arms"]:
        others = min(v["us"] for arm, v in made["arms"].items() if arm != "tilestream")
        made["speedup"] = others / made["arms"]["tilestream"]["us"]
        made["graphs"] = [asdict(w) for w in wholes()[graphs:]]
        made["launches"] = [told(r) for r in prepare.analyses()[regions:]]
    else:
        for arm, call in calls.items():
            made["arms"][arm]["kernels"] = kernels_of(call)
    return made


def told(region: RegionAnalysis) -> dict[str, Any]:
    """A launch and the times of its candidates."""
    candidates = region.plan.candidates if region.plan is not None else ()
    return {
        "name": region.name,
        "operators": len(region.operators),
        "problem": region.problem,
        "chosen": region.plan.chosen.name if region.plan is not None else "",
        "candidates": [[c.name, c.predicted_us, c.measured_us, c.rejected] for c in candidates],
    }


def kernels_of(call: Callable[[], object]) -> list[dict[str, Any]]:
    """The kernels of one call by name, with how often each ran and its microseconds in all, the longest first."""
    from torch.profiler import ProfilerActivity, profile

    call()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        call()
        torch.cuda.synchronize()
    found: dict[str, dict[str, Any]] = {}
    for event in seen.events() or ():
        if event.device_type.name == "CUDA":
            entry = found.setdefault(event.name, {"name": event.name, "calls": 0, "us": 0.0})
            entry["calls"], entry["us"] = entry["calls"] + 1, entry["us"] + event.device_time
    return sorted(found.values(), key=lambda k: -k["us"])


def cache_folders(folder: str) -> dict[str, str]:
    """Environment variables that put every compiler's cache into ``folder``."""
    variables = ("TORCHINDUCTOR_CACHE_DIR", "TRITON_CACHE_DIR", "TILESTREAM_CACHE_DIR", "CUDA_CACHE_PATH")
    return {variable: str(Path(folder) / variable.lower()) for variable in variables}


def write(name: str, made: dict[str, Any], folder: Path) -> None:
    """Write ``made`` as ``folder/name.json``."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / f"{name}.json").write_text(json.dumps(made, indent=1) + "\n")


def line(name: str, made: dict[str, Any]) -> str:
    first = {a: f" ({v['first_call_s']:.1f} s)" if "first_call_s" in v else "" for a, v in made["arms"].items()}
    arms = ", ".join(f"{a} {v['us']:.1f} us{first[a]}" for a, v in made["arms"].items())
    gain = f"; {made['speedup']:.2f} times the best of the others" if "speedup" in made else ""
    return f"{name}{' training' if made['training'] else ''}: {arms}{gain}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"some of {', '.join(CASES)}")
    parser.add_argument("--training", action="store_true")
    parser.add_argument("--max-autotune", action="store_true")
    parser.add_argument("--library", action="store_true", help="eager and Inductor alone, and their kernels")
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--warm", action="store_true", help="compiled before: first calls say nothing then")
    parser.add_argument("--out", type=Path, default=WHOLE)
    given = parser.parse_args()
    if unknown := [name for name in given.cases if name not in CASES]:
        parser.error(f"no case is called {unknown[0]!r}; the cases are {', '.join(CASES)}")
    if not torch.cuda.is_available():
        print("no GPU: nothing to measure", file=sys.stderr)
        return 1
    arms = ARMS if given.max_autotune else tuple(a for a in ARMS if a != "inductor_max_autotune")
    if given.library:
        arms = ("eager", "inductor")
    with tempfile.TemporaryDirectory() as caches:
        os.environ.update({} if given.warm else cache_folders(caches))
        if given.host:
            for model, rows in HOST:
                made = host.run(load(model, rows, device="cuda"), Options())
                write(f"host_{model}_{rows}", made, given.out)
                told = {k: round(v, 1) for k, v in made["us"].items()} | {"regions": made["regions"]}
                print(f"{model} {rows}: {told}", flush=True)
            return 0
        for name in given.cases or CASES:
            try:
                made = measured(name, given.training, arms)
            except Exception as failure:  # one model must not cost the others
                print(f"{name}: failed: {type(failure).__name__}: {failure}", flush=True)
                continue
            for arm in made["arms"].values() if given.warm else ():
                del arm["first_call_s"]
            written = "_".join(filter(None, (name, "training" * given.training, "library" * given.library)))
            write(written, made, given.out)
            print(line(name, made), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
