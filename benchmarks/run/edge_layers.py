"""Time the layers of EdgeConv kernel by kernel: who loads the rows of nodes, and where edges are summed to nodes.

    python -m benchmarks.run.edge_layers [--json FILE] [--seconds 90]

Arms of each layer and graph: today's kernel of the edges' network, whose loader warps copy the rows of nodes, and the
one whose lanes load them, each with the sum at nodes as a kernel behind it; and the network with the sum as its
epilogue. Lists are sorted beforehand. Every arm a CUDA graph, arms in turn, medians. Errors are relative, against
float64, beside those of torch's operators; every arm is run twice, over NaNs, and compared bit by bit. Needs an H100
or H200.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.lib.edge_layers import at_nodes, by_torch, edge_conv, tensors
from tilestream import cuda
from tilestream.devices import get
from tilestream.options import Options
from tilestream.plan.planner import proposals
from tilestream.run import device_ops, oracle, timing

LAYERS = ((16, 64, 64), (64, 64, 64), (64, 128, 128))
NODES, EDGES = 65_536, 1_048_576
DIRECT = "vertical (rows loaded directly)"
STREAMED = "vertical (rows loaded directly, weights streamed)"


def graphs() -> dict[str, Tensor]:
    """How many edges each node has."""
    g = torch.Generator("cuda").manual_seed(0)
    uniform = torch.randint(NODES, (EDGES,), generator=g, device="cuda")
    skewed = (torch.rand(EDGES, generator=g, device="cuda", dtype=torch.float64).pow(-1.1) - 1).clamp(max=NODES - 1)
    return {
        "16 each": torch.full((NODES,), EDGES // NODES, device="cuda"),
        "uniform": torch.bincount(uniform, minlength=NODES),
        "power law": torch.bincount(skewed.long(), minlength=NODES),
    }


def arms(layer: tuple[int, int, int], given: dict[str, Tensor], how: str) -> dict[str, Callable[[], Tensor]]:
    """What makes the sums at nodes."""
    device, made = torch.device("cuda"), {}
    edges = len(given["receivers"])
    order = torch.arange(edges, device=device, dtype=torch.int32)
    _, starts, busy = device_ops.segments(given["receivers"].long(), len(given["v"]))

    def candidates(combine: tuple[str, ...], *names: str) -> dict[str, Any]:
        program = edge_conv(*layer, combine)
        found = {c.name: c.pipeline for c in proposals(program, edges, get("h200"), Options()) if c.pipeline}
        return {name: cuda.build(found[name], device) for name in names}

    def apart(kernel: Any, tensors: dict[str, Tensor]) -> Callable[[], Tensor]:
        def run() -> Tensor:
            rows = kernel(tensors, edges)["edges"]
            return device_ops.segment_reduce(None, rows, order, starts, busy, how)

        return run

    def fused(kernel: Any) -> Callable[[], Tensor]:
        out = torch.empty(len(given["v"]), layer[2], device=device, dtype=torch.bfloat16)

        def run() -> Tensor:
            return kernel(given, edges, {how: out})[how]

        def poisoned() -> Tensor:
            if not torch.cuda.is_current_stream_capturing():
                out.fill_(torch.nan)
            return run()

        return poisoned

    alone = {name: x for name, x in given.items() if name != "starts"}
    for name, kernel in candidates((), "vertical", DIRECT).items():
        made[f"{name}, then segments"] = apart(kernel, alone)
    for name, kernel in candidates((how,), DIRECT, STREAMED).items():
        made[f"{name}, fused"] = fused(kernel)
    return made


def measure(layer: tuple[int, int, int], kind: str, counts: Tensor, how: str) -> dict[str, Any]:
    given = tensors(edge_conv(*layer, (how,)), counts)
    exact = at_nodes(by_torch(given, torch.float64), given, how)
    eager = oracle.error(at_nodes(by_torch(given, torch.bfloat16), given, how), exact)
    row: dict[str, Any] = {"layer": layer, "graph": kind, "combine": how, "eager_error": eager, "us": {}, "errors": {}}
    calls = arms(layer, given, how)
    for name, call in calls.items():
        first = call().clone()
        row["errors"][name] = oracle.error(first, exact)
        row.setdefault("same_bits", {})[name] = bool(torch.equal(first, call()))
    captured = [timing.capture(call) for call in calls.values()]
    samples = timing.interleaved(captured, timing.FEW_ROUNDS)
    row["us"] = {name: round(statistics.median(s), 1) for name, s in zip(calls, samples, strict=True)}
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--seconds", type=float, default=90.0)
    options = parser.parse_args()
    until, rows = time.monotonic() + options.seconds, []
    found = graphs()
    cases = [(layer, "16 each", "max") for layer in LAYERS] + [(LAYERS[1], kind, "sum") for kind in found]
    for layer, kind, how in [*cases, (LAYERS[2], "power law", "max")]:
        if time.monotonic() > until:
            break
        row = measure(layer, kind, found[kind], how)
        rows.append(row)
        print(json.dumps(row), flush=True)
        if options.json:
            options.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
