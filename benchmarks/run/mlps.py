"""Training steps of narrow MLPs beside tiny-cuda-nn's: forward and backward with dX and dW, fp16, no biases.

    python -m benchmarks.run.mlps                        all twelve shapes, on a GPU
    python -m benchmarks.run.mlps 128x4x262144 --json F  one: its width, hidden layers and rows
    python -m benchmarks.run.mlps --tables               write the table of docs/training-results.md

Microseconds by the usual protocol. Errors of gradients against float64, each the largest over tensors: ours, eager's,
and those of tiny-cuda-nn's arithmetic, emulated (``tiny_cuda_nn.py``, which has its own times too).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.lib.marked import table, us, with_parts
from benchmarks.lib.places import DOCS, RESULTS
from benchmarks.lib.tiny_cuda_nn import MICROSECONDS, emulated
from benchmarks.run.whole_models import compiled
from tilestream.bench.environment import environment
from tilestream.run import timing

OUT = RESULTS / "mlps.json"
PAGE = DOCS / "training-results.md"
WIDTHS, DEPTHS, ROWS = (64, 128), (2, 4, 8), (2**14, 2**18)
ARMS = ("eager", "tilestream")
OUTPUTS = 16


def module_of(width: int, hidden: int) -> nn.Sequential:
    layers = [m for _ in range(hidden) for m in (nn.Linear(width, width, bias=False), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, OUTPUTS, bias=False))


def gradients(function: Callable[..., Tensor], module: nn.Module, x: Tensor, gradient: Tensor) -> list[Tensor]:
    """dX, then dW of every layer."""
    return list(torch.autograd.grad(function(x), [x, *module.parameters()], gradient))


def error(got: Tensor, exact: Tensor) -> float:
    return float((got.double() - exact).norm() / exact.norm())


def measured(width: int, hidden: int, rows: int, arms: Sequence[str], device: str = "cuda") -> dict[str, Any]:
    """Times and errors of one shape."""
    torch.manual_seed(0)
    module = module_of(width, hidden).to(device, torch.float16)
    x = torch.randn(rows, width, device=device, dtype=torch.float16, requires_grad=True)
    gradient = torch.randn(rows, OUTPUTS, device=device, dtype=torch.float16)
    torch.compiler.reset()
    calls = [partial(gradients, compiled(arm, module), module, x, gradient) for arm in arms]
    found = {arm: call() for arm, call in zip(arms, calls, strict=True)}
    found["tiny-cuda-nn, emulated"] = emulated(module, x, gradient)
    wide = module_of(width, hidden).to(device, torch.float64)
    wide.load_state_dict(module.state_dict())
    exact = gradients(wide, wide, x.detach().double().requires_grad_(), gradient.double())
    errors = {
        name: {
            "x": error(made[0], exact[0]),
            "weights": max(error(a, b) for a, b in zip(made[1:], exact[1:], strict=True)),
        }
        for name, made in found.items()
    }
    times = timing.timed_side_by_side(calls) if device == "cuda" else []
    return {
        "width": width,
        "hidden": hidden,
        "rows": rows,
        "us": dict(zip(arms, times, strict=False)),
        "errors": errors,
    }


def rows_of(paths: Sequence[Path]) -> dict[tuple[int, int, int], dict[str, Any]]:
    """Results of several files by shape, in the order of the table."""
    rows = [row for path in paths if path.exists() for row in json.loads(path.read_text())["rows"]]
    found = {(row["width"], row["hidden"], row["rows"]): row for row in rows}
    return {shape: found[shape] for shape in product(WIDTHS, DEPTHS, ROWS) if shape in found}


def beside(shapes: dict[tuple[int, int, int], dict[str, Any]]) -> str:
    """The table of the page."""
    lines = []
    for (width, hidden, rows), row in shapes.items():
        theirs, ours = MICROSECONDS[width, rows][DEPTHS.index(hidden)], row["us"]["tilestream"]
        errors = row["errors"]
        exact = errors.get("tilestream", errors.get("eager"))  # both sum in fp32
        pairs = [
            f"{exact[k]:.1e} / {errors['tiny-cuda-nn, emulated'][k]:.1e}" if exact else "-" for k in ("x", "weights")
        ]
        shape = f"{hidden} hidden layers of {width}, {rows:,} rows"
        lines.append([shape, str(theirs), f"**{us(ours)}**", f"{theirs / ours:.2f}", *pairs])
    heads = ["us", "tiny-cuda-nn", "tilestream", "times", "error of dX: sums in fp32 / emulated", "of dW"]
    return table(heads, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("shapes", nargs="*", help="WIDTHxHIDDENxROWS")
    parser.add_argument("--arms", nargs="+", default=list(ARMS))
    parser.add_argument("--json", type=Path, default=OUT)
    parser.add_argument("--join", nargs="+", type=Path, help="time nothing: the results of other processes")
    parser.add_argument("--tables", action="store_true")
    args = parser.parse_args()
    if args.tables:
        text = PAGE.read_text(encoding="utf-8")
        PAGE.write_text(with_parts(text, {"mlps": beside(rows_of([OUT]))}, "run/mlps.py", PAGE.name), encoding="utf-8")
        return
    if args.join:
        where = json.loads(args.join[0].read_text())["environment"]
        made = list(rows_of(args.join).values())
        args.json.write_text(json.dumps({"schema": 1, "environment": where, "rows": made}, indent=1) + "\n")
        return
    shapes = [tuple(map(int, s.split("x"))) for s in args.shapes] or list(product(WIDTHS, DEPTHS, ROWS))
    found: list[dict[str, Any]] = []
    for width, hidden, rows in shapes:
        found.append(measured(width, hidden, rows, args.arms))
        print(found[-1], flush=True)
        args.json.write_text(json.dumps({"schema": 1, "environment": environment(), "rows": found}, indent=1) + "\n")


if __name__ == "__main__":
    main()
