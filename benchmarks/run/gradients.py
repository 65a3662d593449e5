"""Weight and bias gradients of several layers: one stationary sum against eager, Inductor and max-autotune.

    python -m benchmarks.run.gradients  the cases below
    python -m benchmarks.run.gradients chain nerf --rows 65536

bf16, random data; every arm a CUDA graph, all arms of a case in turn, medians. Errors are against float64 on the GPU;
results are poisoned with NaN before the check, and the same input must give the same bits twice. Needs an H100 or H200.
"""

from __future__ import annotations

import argparse
import json
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from tilestream import cuda, devices
from tilestream.bench.timing import captured, interleaved, poisoned_replay
from tilestream.kernels.gradients.cost import cost
from tilestream.plan.gradients import Gradient, weight_gradients

WIDTHS = {
    "chain": (256,) * 9,  # what the prototype ran: 531 us at 262,144 rows
    "nerf": (64, 256, 256, 256, 256, 256, 256, 256, 256, 128, 8),
    "meshgraphnets": (384, 128, 128, 128),
    "dlrm": (480, 512, 256, 8),
    "narrow": (64, 64, 64, 64),
    "wide": (512, 512, 512),
}
ROWS = 262_144


def layers_of(widths: tuple[int, ...]) -> list[Gradient]:
    return [Gradient(f"dy{n}", f"x{n}", f"dw{n}", out, k, f"db{n}") for n, (k, out) in enumerate(pairwise(widths))]


def eager(gradients: list[Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """As autograd's graph has them."""
    return [made for dy, x in zip(gradients, inputs, strict=True) for made in (dy.t() @ x, dy.sum(0))]


def measure(name: str, rows: int, autotune: bool) -> dict[str, object]:
    """Microseconds of every arm, errors, and the prediction."""
    torch._dynamo.reset()
    layers, device = layers_of(WIDTHS[name]), devices.get("h200")
    pipeline = weight_gradients(name, layers, device)
    tensors = {}
    for layer in layers:
        for what, columns in ((layer.gradient, layer.out), (layer.input, layer.k)):
            tensors[what] = torch.randn(rows, columns, device="cuda", dtype=torch.bfloat16)
    given = [tensors[layer.gradient] for layer in layers], [tensors[layer.input] for layer in layers]
    compiled = cuda.build(pipeline)
    inductor, autotuned = torch.compile(eager), torch.compile(eager, mode="max-autotune-no-cudagraphs")

    def ours() -> list[Tensor]:
        found = compiled(tensors, rows)
        return [found[what] for layer in layers for what in (layer.weight, layer.bias)]

    arms = {
        "tilestream": ours,
        "eager": lambda: eager(*given),
        "inductor": lambda: inductor(*given),
        **({"max-autotune": lambda: autotuned(*given)} if autotune else {}),
    }
    graphs = {arm: captured(run) for arm, run in arms.items()}
    exact = eager(*([t.double() for t in of] for of in given))
    results = {arm: poisoned_replay(graph) for arm, graph in graphs.items()}
    errors = {
        arm: max(float((r.double() - e).norm() / e.norm()) for r, e in zip(found, exact, strict=True))  # pyright: ignore
        for arm, found in results.items()
    }
    once = [t.clone() for t in ours()]
    same = all(torch.equal(a, b) for a, b in zip(once, ours(), strict=True))
    times = {arm: t.us for arm, t in interleaved(graphs).items()}
    predicted = cost(pipeline, rows, device)
    best = min((us, arm) for arm, us in times.items() if arm != "tilestream")
    return {
        "case": name, "rows": rows, "us": times, "errors": errors, "same_bits": same, "best_other": best[1],
        "speedup": best[0] / times["tilestream"], "predicted_us": predicted.us,
        "floor_us": 1e6 * max(predicted["tensor"].seconds, predicted["dram"].seconds),
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", default=list(WIDTHS), help=f"of {', '.join(WIDTHS)}")
    parser.add_argument("--rows", type=int, default=ROWS)
    parser.add_argument("--no-autotune", action="store_true", help="without that arm, which takes minutes to compile")
    parser.add_argument("--json", type=Path, help="write the results here too")
    args = parser.parse_args()
    results = []
    for name in args.cases:
        results.append(found := measure(name, args.rows, not args.no_autotune))
        us = ", ".join(f"{arm} {t:.0f}" for arm, t in found["us"].items())  # pyright: ignore
        print(
            f"{name}: {us} us; {found['speedup']:.2f} times the best other; predicted {found['predicted_us']:.0f},"
            f" floor {found['floor_us']:.0f} us; errors {found['errors']}; same bits: {found['same_bits']}",
            flush=True,
        )
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
