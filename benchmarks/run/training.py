"""Time training steps, forward, loss, backward and a fused optimizer: eager, Inductor, max-autotune and tilestream.

    python -m benchmarks.run.training nerf_65536 mgn          some of the cases below
    python -m benchmarks.run.training --max-autotune nerf_65536  that arm too, which takes minutes to compile
    python -m benchmarks.run.training --kernels mgn           and every arm's kernels, with those of sums by an index
    python -m benchmarks.run.training --apart mgn             arms in processes of their own, which compile side by side

bf16, random data, Adam (fused, capturable). A step is one CUDA graph in every arm; rounds interleaved, medians. Each
arm has a copy of the model and an optimizer of its own. Peak memory is what a step allocates beyond what is there
before it. Needs an H100 or H200. Where losses end: ``losses.py``.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.lib import apart
from benchmarks.run.whole_models import compiled, kernels_of, told
from tilestream.apps.models import find
from tilestream.run import prepare, timing
from tilestream.run.stopwatch import spent
from tilestream.run.whole import wholes

CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "nerf_65536": ("nerf", {"rows": 65536}),
    "nerf_262144": ("nerf", {"rows": 262144}),
    "mgn": ("mgn", {"batch": 8}),
    "mgn_200000": ("mgn", {"batch": 18}),
    "graphcast_small_4": ("graphcast_small", {"steps": 4}),
    "graphcast_small_16": ("graphcast_small", {}),
    "llama_layer": ("llama_prefill+sdpa", {"layers": 1, "layers_only": True}),
    "dlrm_2048": ("dlrm", {"batch": 2048, "max_rows": 100_000}),
    "dlrm_32768": ("dlrm", {"batch": 32768, "max_rows": 100_000}),
}
RATE = 1e-4
SCATTERS = {
    "atomics": ("indexFunc", "index_put", "scatter", "dense_backward", "indexing_backward"),
    "sorts": ("Sort", "tilestream_keys", "tilestream_starts"),
    "sorted sums": ("tilestream_segment",),
}
"""What kernels that sum rows by an index have in their names."""


@dataclass(frozen=True)
class Trainer:
    """A model, what runs it, and its optimizer."""

    module: nn.Module
    function: Callable[..., Any]
    optimizer: torch.optim.Optimizer
    inputs: tuple[Tensor, ...]
    targets: tuple[Tensor, ...]

    def step(self) -> Tensor:
        """One step; the loss before it."""
        loss = self.gradients()
        self.optimizer.step()
        return loss

    def gradients(self) -> Tensor:
        """Forward, loss, backward; the loss."""
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss()
        loss.backward()
        return loss.detach()

    def loss(self) -> Tensor:
        """Mean square error to fixed random targets, over all results."""
        made = results(self.function(*self.inputs))
        return torch.stack([(y.float() - t).square().mean() for y, t in zip(made, self.targets, strict=True)]).sum()


def results(made: object) -> list[Tensor]:
    return [y for y in pytree.tree_leaves(made) if isinstance(y, Tensor) and y.is_floating_point()]


def trainer(arm: str, module: nn.Module, inputs: tuple[Tensor, ...], targets: tuple[Tensor, ...]) -> Trainer:
    own = copy.deepcopy(module)
    wanted = [p for p in own.parameters() if p.requires_grad]
    optimizer = torch.optim.Adam(wanted, lr=RATE, fused=True, capturable=True)
    return Trainer(own, compiled(arm, own), optimizer, inputs, targets)


def peak(run: Callable[[], object]) -> int:
    """Bytes that a call allocates at most, beyond what is there before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def made(name: str) -> tuple[nn.Module, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A case's model, inputs and targets."""
    model, sizes = CASES[name]
    module, inputs = find(model).make(device="cuda", training=True, **sizes)
    with torch.no_grad():
        shapes = [y.shape for y in results(module(*inputs))]
    return module, inputs, tuple(torch.randn(shape, device="cuda") for shape in shapes)


def measured(name: str, arms: list[str], kernels: bool) -> dict[str, Any]:
    """Microseconds, bytes and first calls of every arm."""
    module, inputs, targets = made(name)
    found: dict[str, Any] = {"case": name, "arms": {}}
    steps: dict[str, Callable[[], object]] = {}
    gradients: dict[str, Callable[[], object]] = {}
    torch.compiler.reset()
    for arm in arms:
        own = trainer(arm, module, inputs, targets)
        found["arms"][arm], told_of = first_steps(name, arm, own)
        found |= told_of
        steps[arm], gradients[arm] = own.step, own.gradients
    for key, calls in (("us", steps), ("gradients_us", gradients)):
        times = timing.timed_side_by_side(list(calls.values()))
        for arm, us in zip(calls, times, strict=True):
            found["arms"][arm][key] = us
    found |= speedup(found["arms"])
    if kernels:
        found["kernels"] = {arm: kernels_of(step) for arm, step in steps.items()}
        found["scatters_us"] = {arm: scatters(rows) for arm, rows in found["kernels"].items()}
    return found


def first_steps(name: str, arm: str, own: Trainer) -> tuple[dict[str, Any], dict[str, Any]]:
    """Seconds of the step that compiles and bytes of a later one; and of ours its parts, its graphs and launches."""
    regions, graphs = len(prepare.analyses()), len(wholes())
    before, start = spent(), time.perf_counter()
    own.step()
    torch.cuda.synchronize()
    row: dict[str, Any] = {"first_call_s": time.perf_counter() - start}
    own.step()
    row["peak_bytes"] = peak(own.step)
    print(f"   {arm} of {name}: {row}", flush=True)
    if arm != "tilestream":
        return row, {}
    return row, {
        "parts_s": {part: round(s - before.get(part, 0.0), 1) for part, s in spent().items()},
        "graphs": [asdict(w) for w in wholes()[graphs:]],
        "launches": [told(r) for r in prepare.analyses()[regions:]],
    }


def of_arm(arm: str, name: str) -> apart.Ready:
    """One arm in a process of its own."""
    torch.manual_seed(0)
    own = trainer(arm, *made(name))
    row, told_of = first_steps(name, arm, own)
    return {"row": row, "told": told_of}, {"us": own.step, "gradients_us": own.gradients}


def measured_apart(name: str, arms: list[str]) -> dict[str, Any]:
    """As ``measured``, arms in processes of their own."""
    found: dict[str, Any] = {"case": name, "arms": {}, "note": "arms in processes of their own, timed in turn"}
    for arm, one in apart.timed(of_arm, arms, name).items():
        found["arms"][arm] = {**one["row"], **{key: one[key] for key in ("us", "gradients_us")}}
        found |= one["told"]
    return found | speedup(found["arms"])


def speedup(arms: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """How much longer the best of the others takes than ours, where both were timed."""
    others = [v["us"] for arm, v in arms.items() if arm != "tilestream"]
    return {"speedup": min(others) / arms["tilestream"]["us"]} if others and "tilestream" in arms else {}


def scatters(kernels: list[dict[str, Any]]) -> dict[str, float]:
    """Microseconds of a step's kernels that sum rows by an index, and of their sorts."""
    found = dict.fromkeys(SCATTERS, 0.0)
    for kernel in kernels:
        kinds = (kind for kind in reversed(SCATTERS) if any(part in kernel["name"] for part in SCATTERS[kind]))
        if (kind := next(kinds, None)) is not None:
            found[kind] += kernel["us"]
    return found


def line(found: dict[str, Any]) -> str:
    arms = ", ".join(
        f"{arm} {a['us']:.0f} us, {a['gradients_us']:.0f} without its optimizer, {a['peak_bytes'] / 2**20:.0f} MiB"
        f" ({a['first_call_s']:.1f} s)"
        for arm, a in found["arms"].items()
    )
    gain = f"; {found['speedup']:.2f} times the best of the others" if "speedup" in found else ""
    return f"{found['case']}: {arms}{gain}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", help=f"of {', '.join(CASES)}")
    parser.add_argument("--max-autotune", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--apart", action="store_true", help="arms in processes of their own; no kernels then")
    parser.add_argument("--arms", nargs="+", help="of eager, inductor, inductor_max_autotune, tilestream")
    parser.add_argument("--json", type=Path, help="write the results here too")
    args = parser.parse_args()
    arms = ["eager", "inductor", *(["inductor_max_autotune"] if args.max_autotune else []), "tilestream"]
    arms = args.arms or arms
    found = []
    for name in args.cases or CASES:
        found.append(measured_apart(name, arms) if args.apart else measured(name, arms, args.kernels))
        if args.json:
            args.json.write_text(json.dumps(found, indent=1) + "\n")
        print(line(found[-1]), flush=True)
        for launch in found[-1].get("launches", ()):
            print("  ", launch, flush=True)
        print("  ", found[-1].get("graphs", ""), found[-1].get("parts_s", ""), flush=True)
        for arm, rows in found[-1].get("kernels", {}).items():
            print("  ", arm, {kind: round(us, 1) for kind, us in found[-1]["scatters_us"][arm].items()})
            for row in rows:
                print(f"      {row['calls']:3d} {row['us']:8.1f} us {row['name'][:130]}")


if __name__ == "__main__":
    main()
