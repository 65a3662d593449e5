"""Gradients of a training step of the five applications against float64: ours beside eager's.

    python -m benchmarks.run.gradient_errors                                 all, on a GPU, each in a process of its own
    python -m benchmarks.run.gradient_errors mgn --arms eager inductor tilestream
    python -m benchmarks.run.gradient_errors nerf_65536 --device cpu --tiny --json FILE  a dry run, reference machine

bf16 parameters, inputs and targets of ``training.py``; the loss is its mean square error. Float64 has the same values
exactly. An error is relative, in the L2 norm: over all gradients as one vector, and of the parameter with the largest.
Plans are chosen by prediction (``measure=False``). ``same_bits``: two steps from the same state gave the same gradients
bit for bit. Results replace those of the same cases in the file.
"""

from __future__ import annotations

import argparse
import copy
import json
import sys
import time
from collections.abc import Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.lib.places import RESULTS
from benchmarks.run.training import CASES, results
from tilestream.apps.models import find
from tilestream.bench.environment import environment
from tilestream.run import oracle, prepare
from tilestream.run.backend import tilestream

OUT = RESULTS / "gradient_errors.json"
WANTED = ("nerf_65536", "mgn", "graphcast_small_4", "dlrm_2048", "llama_layer")
TINY: dict[str, dict[str, Any]] = {
    "nerf_65536": {"rows": 64, "depth": 3, "width": 16, "skip": 1},
    "mgn": {"nodes": 20, "edges": 60, "steps": 2},
    "graphcast_small_4": {"latitudes": 9, "longitudes": 16, "level": 1, "width": 16, "steps": 1},
    "dlrm_2048": {"batch": 12, "max_rows": 50},
    "llama_layer": {"layers": 1, "width": 64, "heads": 4, "kv_heads": 2, "hidden": 96, "vocabulary": 100},
}
"""Sizes of a dry run."""
ARMS = ("eager", "tilestream")


def gradients(function: Any, module: nn.Module, inputs: Sequence[Tensor], targets: Sequence[Tensor]) -> list[Tensor]:
    """Of every parameter that has one, after one step: mean square errors in fp32, or in float64 as the results."""
    module.zero_grad(set_to_none=True)
    made = [y if y.dtype == torch.float64 else y.float() for y in results(function(*inputs))]
    torch.stack([(y - t.to(y.dtype)).square().mean() for y, t in zip(made, targets, strict=True)]).sum().backward()
    return [p.grad for p in module.parameters() if p.grad is not None]


def judged(got: Sequence[Tensor], exact: Sequence[Tensor]) -> dict[str, float]:
    """Relative errors: of all gradients as one vector, and the largest of one parameter's."""
    pairs = [(g.double(), e) for g, e in zip(got, exact, strict=True)]
    off, size = (torch.stack([x.square().sum() for x in xs]).sum().sqrt() for xs in ([g - e for g, e in pairs], exact))
    return {"error": float(off / size), "worst": max(oracle.error(g, e) for g, e in pairs)}


def compiled(arm: str, module: nn.Module, device: str) -> Any:
    if arm == "eager":
        return module
    target = {"target": "reference"} if device == "cpu" else {}
    how: dict[str, Any] = {} if arm == "inductor" else {"backend": tilestream, "options": {"measure": False, **target}}
    return torch.compile(module, dynamic=False, **how)


def measured(case: str, arms: Sequence[str], device: str, tiny: bool) -> dict[str, Any]:
    """Errors of every arm, and how many launches of the step were ours, equal ones counted one by one."""
    torch.manual_seed(0)
    model, sizes = CASES[case]
    module, inputs = find(model).make(device=device, training=True, **(TINY[case] if tiny else sizes))
    with torch.no_grad():
        targets = [torch.randn(y.shape, device=device) for y in results(module(*inputs))]
    wide = copy.deepcopy(module).double()
    exact = gradients(wide, wide, [x.double() if x.is_floating_point() else x for x in inputs], targets)
    del wide
    found: dict[str, Any] = {"case": case, "sizes": TINY[case] if tiny else sizes, "arms": {}}
    for arm in arms:
        start = time.perf_counter()
        own = copy.deepcopy(module)
        function = compiled(arm, own, device)
        first, second = (gradients(function, own, inputs, targets) for _ in range(2))
        same = all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
        found["arms"][arm] = {**judged(first, exact), "same_bits": same}
        print(f"{case} {arm}: {found['arms'][arm]}, {time.perf_counter() - start:.1f} s", flush=True)
    found["launches"] = sum(r.runner not in ("inductor", "eager") for r in prepare.analyses())
    return found


def _child(to: Any, *given: Any) -> None:
    to.send(measured(*given))


def side_by_side(cases: Sequence[str], given: argparse.Namespace, keep: Any) -> int:
    """Each case in a process of its own; ``keep`` is called as they end. How many of them failed."""
    context, running = get_context("spawn"), {}
    for case in cases:
        end, theirs = context.Pipe(duplex=False)
        process = context.Process(target=_child, args=(theirs, case, given.arms, given.device, given.tiny))
        process.start()
        theirs.close()
        running[case] = (process, end)
    failed = 0
    while running:
        for case, (process, end) in list(running.items()):
            if not end.poll(0.1):
                continue
            del running[case]
            try:
                keep(end.recv())
            except EOFError:  # its own words are on stderr
                failed += 1
            process.join()
    return failed


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(WANTED)}")
    parser.add_argument("--arms", nargs="+", default=list(ARMS), help="of eager, inductor, tilestream")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="sizes of a dry run")
    parser.add_argument("--json", type=Path, default=OUT)
    given = parser.parse_args(words)
    cases = given.cases or list(WANTED)
    data: dict[str, Any] = json.loads(given.json.read_text()) if given.json.exists() else {"rows": []}

    def keep(row: dict[str, Any]) -> None:
        kept = {r["case"]: r for r in data["rows"]} | {row["case"]: row}
        data["rows"] = [kept[case] for case in WANTED if case in kept]
        data["environment"] = environment()
        given.json.write_text(json.dumps({"schema": 1, **data}, indent=1) + "\n")

    if len(cases) == 1:
        keep(measured(cases[0], given.arms, given.device, given.tiny))
        return 0
    return min(1, side_by_side(cases, given, keep))


if __name__ == "__main__":
    sys.exit(main())
