"""PyTorch Geometric's layers through ``torch.compile(backend="tilestream")``: which are right, and which crash.

    python -m benchmarks.run.pyg_layers                  all of ``benchmarks/lib/pyg_layers.py``
    python -m benchmarks.run.pyg_layers GATConv SAGE     those whose names begin so
    python -m benchmarks.run.pyg_layers --graphs         what Inductor would compile runs as the graph that it is given

On a GPU, or on the CPU by our reference machine. Each layer is called without gradients and with them, in float32; its
results, and the gradients of its inputs and parameters, are right if their errors against float64 are at most twice
eager's. An exception of ours that would cost a user a region counts as a crash. Results go to
``benchmarks/results/pyg_layers.json``. Needs ``torch_geometric``.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from benchmarks.lib.places import RESULTS, module_command
from benchmarks.lib.pyg_layers import LAYERS, make
from tilestream.announce import STRICT
from tilestream.plan import messages
from tilestream.run import oracle, prepare
from tilestream.run.backend import tilestream

LEAST = 4e-6
"""Errors below this say nothing: some tens of roundings of float32."""
WAYS = ("inference", "training")
NO_ANSWER = "no answer in time, or the process ended"


def called(function: Callable[..., Any], module: nn.Module, inputs: Sequence[Any], training: bool) -> list[Tensor]:
    """Results; in training also the gradients of inputs and parameters, zeros where there is none."""
    if not training:
        with torch.no_grad():
            return [y for y in pytree.tree_leaves(function(*inputs)) if isinstance(y, Tensor)]
    module.zero_grad(set_to_none=True)
    given = [x.detach().requires_grad_() if x.is_floating_point() else x for x in inputs]
    results = [y for y in pytree.tree_leaves(function(*given)) if isinstance(y, Tensor)]
    grown = [y for y in results if y.requires_grad]
    leaves = [x for x in given if x.requires_grad] + list(module.parameters())
    if grown:
        torch.stack([(y * torch.cos(y.detach())).sum() for y in grown]).sum().backward()
    return [y.detach() for y in results] + [torch.zeros_like(x) if x.grad is None else x.grad for x in leaves]


def tried(name: str, device: str) -> dict[str, Any]:
    """What became of a layer, each way."""
    row: dict[str, Any] = {"layer": name}
    module, inputs = make(name, device)
    wide = copy.deepcopy(module).double()
    wider = [x.double() if x.is_floating_point() else x for x in inputs]
    for way in WAYS:
        torch.compiler.reset()
        training, before = way == "training", len(prepare.analyses())
        options: dict[str, Any] = {} if device == "cuda" else {"target": "reference"}
        try:
            exact = called(wide, wide, wider, training)
            eager = called(module, module, inputs, training)
        except Exception as failure:
            row[way] = {"eager_crashed": f"{type(failure).__name__}: {failure}"[:200]}
            continue
        start = time.perf_counter()
        try:
            function = torch.compile(module, backend=tilestream, options=options)
            ours = called(function, module, inputs, training)
            again = called(function, module, inputs, training)
        except Exception as failure:
            row[way] = {"crashed": f"{type(failure).__name__}: {failure}"[:600]}
            continue
        pairs = [(oracle.error(a, x), oracle.error(b, x)) for a, b, x in zip(ours, eager, exact, strict=True)]
        worst = max(pairs, key=lambda p: p[0] / max(p[1], LEAST))
        row[way] = {
            "right": all(a <= oracle.FACTOR * max(b, LEAST) for a, b in pairs),
            "same_twice": all(torch.equal(a, b) for a, b in zip(ours, again, strict=True)),
            "error": worst[0],
            "eager": worst[1],
            "regions": len(prepare.analyses()) - before,
            "s": time.perf_counter() - start,
        }
    return row


def without_inductor() -> None:
    """Graphs that Inductor would compile run as they are, and sums of few rows pay: tried is what graphs become."""
    from torch._inductor import compile_fx

    def inner(graph: Any, inputs: Sequence[Any], **_: Any) -> Callable[..., Any]:
        def run(boxed: list[Any]) -> Any:
            given = list(boxed)
            boxed.clear()
            return graph(*given)

        run._boxed_call = True  # pyright: ignore[reportFunctionMemberAccess]
        return run

    compile_fx.compile_fx_inner = inner  # pyright: ignore[reportAttributeAccessIssue]
    messages.atomics_us = lambda _: 1e9


def kinds(rows: Sequence[dict[str, Any]]) -> dict[str, Counter[str]]:
    """For each way how many layers were right, wrong, crashed, and ran a region of ours."""
    found = {way: Counter[str]() for way in WAYS}
    for row in rows:
        for way in WAYS:
            told = row.get(way, {"crashed": NO_ANSWER})
            became = next((b for b in ("crashed", "eager_crashed") if b in told), "")
            found[way][became or ("right" if told["right"] else "wrong")] += 1
            found[way]["with a region"] += bool(told.get("regions"))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*")
    parser.add_argument("--graphs", action="store_true")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=3600.0)
    parser.add_argument("--of", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=RESULTS / "pyg_layers.json")
    given = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if given.of:
        if given.graphs:
            without_inductor()
        for name in given.layers:
            print(json.dumps(tried(name, device)), flush=True)
        return 0
    chosen = [n for n in LAYERS if not given.layers or any(n.startswith(w) for w in given.layers)]
    rows = in_processes(chosen, given)
    made = {"schema": 1, "device": device, "inductor": not given.graphs, "rows": sorted(rows, key=lambda r: r["layer"])}
    given.out.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    for row in rows:
        for way in WAYS:
            told = row.get(way, {"crashed": NO_ANSWER})
            if not told.get("right"):
                print(f"{row['layer']} {way}: {told}")
    for way, found in kinds(rows).items():
        print(f"{way}: {len(rows)} layers: {dict(found)}")
    return 0


def in_processes(names: Sequence[str], given: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of all layers, several processes at once; of those that did not answer the name alone."""
    until = time.time() + given.seconds
    rows: dict[str, dict[str, Any]] = {name: {"layer": name} for name in names}
    with tempfile.TemporaryDirectory() as caches:
        environ = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "1", "OMP_NUM_THREADS": "1"}
        environ |= {
            STRICT: "1",
            "TORCHINDUCTOR_CACHE_DIR": f"{caches}/inductor",
            "TILESTREAM_CACHE_DIR": f"{caches}/ours",
        }
        running: list[subprocess.Popen[bytes]] = []
        for k in range(given.processes):
            command = [*module_command("run.pyg_layers"), "--of", *["--graphs"] * given.graphs]
            with open(f"{caches}/{k}", "wb") as said:
                running.append(subprocess.Popen([*command, *names[k :: given.processes]], env=environ, stdout=said))
        for process in running:
            try:
                process.wait(max(0.1, until - time.time()))
            except subprocess.TimeoutExpired:
                process.kill()
        for k in range(given.processes):
            for line in Path(f"{caches}/{k}").read_text().splitlines():
                if line.startswith("{"):
                    row = json.loads(line)
                    rows[row["layer"]] = row
    return list(rows.values())


if __name__ == "__main__":
    sys.exit(main())
