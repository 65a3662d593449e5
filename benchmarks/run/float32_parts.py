"""Float32 layers by parts of bf16: their error beside eager's, and their time beside eager's and Inductor's.

    python -m benchmarks.run.float32_parts --json FILE
    python -m benchmarks.run.float32_parts --cpu         tiny, on our reference machine: values alone

``sums``: six bf16 products with fp32 sums, as cuBLAS makes them, over the parts in the order of ``ir.float32``: the
relative error against float64, over that of ``torch.mm`` in float32; random numbers, positive ones, and ReLU's.
``chains``: ``n - n - n - n`` with SiLU and a residual, under ``torch.no_grad()``; medians of interleaved CUDA graphs.
Needs an H100 or H200.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from tilestream.ir.float32 import PAIRS
from tilestream.run import oracle, timing
from tilestream.run.backend import tilestream
from tilestream.run.call import weight_parts

ROWS = 77_878
"""Edges of DimeNet++'s batch of molecules."""


class Chain(nn.Module):
    """Layers of one width, and a residual around all."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        made = [nn.Linear(width, width) for _ in range(layers)]
        for layer in made:
            nn.init.kaiming_normal_(layer.weight)
        self.layers = nn.ModuleList(made)

    def forward(self, x: Tensor) -> Tensor:
        h = x
        for layer in self.layers:
            h = functional.silu(layer(h))
        return h + x


def _left_parts(x: Tensor) -> Tensor:
    """The left operand that belongs to the parts of a weight."""
    whole = weight_parts([x])[0].split(x.shape[1], 1)
    found = {of_weight: whole[k] for k, (_, of_weight) in enumerate(PAIRS)}
    return torch.cat([found[of_x] for of_x, _ in PAIRS], 1)


def _float32_sum(left: Tensor, right: Tensor) -> Tensor:
    return torch.mm(left, right.t(), out_dtype=torch.float32) if left.is_cuda else left.float() @ right.float().t()


def sums(device: str, rows: int) -> list[dict[str, Any]]:
    """Errors of products over 64 to 512 features."""
    made = []
    data: dict[str, Callable[[Tensor], Tensor]] = {"random": lambda t: t, "positive": torch.abs, "relu": torch.relu}
    for name, changed in data.items():
        for features in (64, 128, 192, 256, 384, 512):
            torch.manual_seed(features)
            x = changed(torch.randn(rows, features, device=device))
            weight = torch.randn(128, features, device=device) / features**0.5
            weight = weight.abs() if name == "positive" else weight
            exact = x.double() @ weight.double().t()
            ours = _float32_sum(_left_parts(x), weight_parts([weight])[0])
            eager = oracle.error(torch.mm(x, weight.t()), exact)
            ratio = oracle.error(ours, exact) / eager
            made.append({"data": name, "features": features, "eager": eager, "ratio": ratio})
    return made


def chain(width: int, layers: int, rows: int, device: str, **options: Any) -> dict[str, Any]:
    """Errors and times of one chain."""
    torch.manual_seed(0)
    module, x = Chain(width, layers).to(device), torch.randn(rows, width, device=device)
    fast = torch.compile(module, backend=tilestream, options=options)
    with torch.no_grad():
        arms: dict[str, Callable[[], Tensor]] = {"eager": lambda: module(x), "tilestream": lambda: fast(x)}
        if device == "cuda":
            inductors = torch.compile(module)
            arms["inductor"] = lambda: inductors(x)
        results = {name: run() for name, run in arms.items()}
        exact = Chain(width, layers).to(device).double()
        exact.load_state_dict(module.state_dict())
        errors = {name: oracle.error(y, exact(x.double())) for name, y in results.items()}
        same = torch.equal(results["tilestream"], arms["tilestream"]())
        told = {"width": width, "layers": layers, "rows": rows, "errors": errors, "same_bits": same} | options
        if device == "cuda":
            told["us"] = dict(zip(arms, timing.timed_side_by_side(list(arms.values())), strict=True))
        return told


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--cpu", action="store_true")
    asked = parser.parse_args()
    device, rows = ("cpu", 200) if asked.cpu else ("cuda", ROWS)
    options: dict[str, Any] = {"target": "reference"} if asked.cpu else {"strategy": "vertical"}
    found: dict[str, Any] = {"sums": sums(device, min(rows, 4096)), "chains": []}
    for width, layers in ((128, 3), (128, 1), (64, 3), (256, 2), (128, 6)):
        torch._dynamo.reset()
        try:
            found["chains"].append(chain(width, layers, rows, device, **options))
        except Exception as failure:
            found["chains"].append(
                {"width": width, "layers": layers, "failure": f"{type(failure).__name__}: {failure}"}
            )
        print(json.dumps(found["chains"][-1]), flush=True)
        if asked.json:
            asked.json.write_text(json.dumps(found, indent=1) + "\n")
    for each in found["sums"]:
        print(json.dumps(each))


if __name__ == "__main__":
    main()
