"""DLRM's lookups and interaction: our kernels against eager, Inductor and max-autotune, forward and backward.

    python -m benchmarks.run.interaction                        the batches below
    python -m benchmarks.run.interaction 2048 --tables 1000     others, and tables that fit the L2
    python -m benchmarks.run.interaction 32768 --warps 4 6 7 8  our kernels with other numbers of warps a CTA
    python -m benchmarks.run.interaction --model 2048 32768     the whole model, inference and a training step too

bf16, random indices over 26 tables of 128; every arm a CUDA graph, all arms of a case in turn, medians. Backward, the
others have the rows saved, ours looks them up again. Errors are against float64; results are poisoned with NaN before
the check. Whole models: Inductor, ours with the option off and on. Needs an H100 or H200.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from tilestream import devices
from tilestream.apps.models import find
from tilestream.bench.timing import captured, interleaved, poisoned_replay
from tilestream.cuda import interaction as kernels
from tilestream.graph.interaction.op import interaction, interaction_backward, multiplied, picked, stacked
from tilestream.plan.interaction import Sizes, ours
from tilestream.run.backend import tilestream
from tilestream.run.timing import Captured, timed_side_by_side
from tilestream.run.trials import Operands, operands

FEATURES, TABLES, PAIRS = 128, 26, 351


def dlrm(batch: int) -> Sizes:
    return Sizes(batch, TABLES + 1, FEATURES, PAIRS, 0, TABLES)


@contextmanager
def warps_of(count: int | None) -> Iterator[None]:
    """Our kernels with so many warps a CTA."""
    if count is None:
        yield
        return
    kernels.lane_kernel.cache_clear()
    with mock.patch.object(kernels.Kernel, "warps", count):
        yield
    kernels.lane_kernel.cache_clear()


def arms_of(made: Operands, backward: bool, warps: list[int | None], autotune: bool) -> dict[str, Captured]:
    """What is timed, by name."""
    arms: dict[str, Captured] = {}
    rows = stacked(made.sources, made.indices) if backward else None

    def plain(sources: list[Tensor], indices: list[Tensor | None], first: Tensor, second: Tensor) -> Tensor:
        return picked(stacked(sources, indices), first, second, made.head, pad=False)

    def ours() -> Tensor:
        if backward:
            return kernels.backward(*made.ours, made.given)
        return kernels.forward(*made.ours, made.head)

    for count in warps:
        with warps_of(count):  # the kernel is chosen when it is captured
            arms["tilestream" if count is None else f"tilestream, {count} warps"] = captured(ours)
    modes = {"inductor": None, **({"max-autotune": "max-autotune-no-cudagraphs"} if autotune else {})}
    given = (rows, made.first, made.second, made.given) if backward else made.ours
    function: Any = multiplied if backward else plain
    for name, run in {"eager": function, **{n: torch.compile(function, mode=m) for n, m in modes.items()}}.items():
        arms[name] = captured(lambda run=run: run(*given))
    return arms


def measure(batch: int, backward: bool, tables: int, warps: list[int | None], autotune: bool) -> dict[str, Any]:
    """Microseconds of every arm, errors, prediction and floor."""
    torch._dynamo.reset()
    sizes, device = dlrm(batch), devices.get("h200")
    made = operands(sizes, (0, *[tables] * TABLES), torch.bfloat16, torch.device("cuda"))
    graphs = arms_of(made, backward, warps, autotune)
    wide = [s.double() for s in made.sources], *made.ours[1:]
    exact = interaction_backward(*wide, made.given.double()) if backward else interaction(*wide, made.head)
    errors = {}
    for arm, graph in graphs.items():
        found: Any = poisoned_replay(graph)
        result = found[0] if isinstance(found, list | tuple) else found
        want = exact
        if not arm.startswith("tilestream"):
            want = exact.transpose(0, 1) if backward else exact[:, : result.shape[1]]
        errors[arm] = float((result.double() - want).norm() / want.norm())
    times = {arm: t.us for arm, t in interleaved(graphs).items()}
    size = sizes.backward_bytes if backward else sizes.forward_bytes
    parts = ours(sizes, backward, device)
    predicted = parts["backward" if backward else "forward"].seconds
    others = {arm: us for arm, us in times.items() if not arm.startswith("tilestream")}
    best = min(others, key=others.__getitem__)
    mine = min(us for arm, us in times.items() if arm.startswith("tilestream"))
    return {
        "batch": batch, "backward": backward, "tables": tables, "us": times, "errors": errors, "best_other": best,
        "speedup": others[best] / mine, "predicted_us": predicted * 1e6,
        "floor_us": size / device.dram_bytes_per_s * 1e6,
    }  # fmt: skip


def whole(batch: int, training: bool) -> dict[str, Any]:
    """Microseconds of the whole model by Inductor, and by ours with the option off and on."""
    times = {}
    for arm in ("inductor", "off", "on"):
        torch.compiler.reset()
        module, inputs = find("dlrm").make(device="cuda", batch=batch, max_rows=100_000, training=training)
        options = {"interactions": arm == "on"}
        ours: dict[str, Any] = {} if arm == "inductor" else {"backend": tilestream, "options": options}
        fast = torch.compile(module, dynamic=False, **ours)
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-4, fused=True, capturable=True) if training else None

        def step(fast: Any = fast, inputs: Any = inputs, optimizer: Any = optimizer) -> None:
            if optimizer is None:
                with torch.no_grad():
                    fast(*inputs)
                return
            optimizer.zero_grad(set_to_none=True)
            fast(*inputs).float().square().mean().backward()
            optimizer.step()

        times[arm] = timed_side_by_side([step])[0]
    return {"batch": batch, "training": training, "us": times}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("batches", type=int, nargs="*", default=[2048, 8192, 32768])
    parser.add_argument("--tables", type=int, default=100_000, help="rows of each of the 26 tables")
    parser.add_argument("--warps", type=int, nargs="+", help="a CTA, beside the kernel's own choice")
    parser.add_argument("--no-autotune", action="store_true", help="without that arm, which takes minutes to compile")
    parser.add_argument("--model", action="store_true", help="the whole model too")
    parser.add_argument("--json", type=Path, help="write the results here too")
    args = parser.parse_args()
    results = []
    for batch in args.batches:
        for backward in (False, True):
            warps = [None, *(args.warps or [])]
            results.append(found := measure(batch, backward, args.tables, warps, not args.no_autotune))
            us = ", ".join(f"{arm} {t:.1f}" for arm, t in found["us"].items())
            print(
                f"{batch} {'backward' if backward else 'forward'}: {us} us; {found['speedup']:.2f} times the best"
                f" other; predicted {found['predicted_us']:.1f}, floor {found['floor_us']:.1f} us;"
                f" errors {found['errors']}",
                flush=True,
            )
        for training in (False, True) if args.model else ():
            results.append(found := whole(batch, training))
            print(batch, "training step" if training else "inference", found["us"], flush=True)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
