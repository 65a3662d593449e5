"""Programs as loops on one core, beside torch.sparse and scipy: GCN and GraphSAGE, unfused and a region a layer.

python benchmarks/sparse_cpu.py [--cora FILE] [--nodes N] [--out FILE]: milliseconds, the best of five, in float64.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import scipy.sparse
import torch

from tilestream.sparse import Schedule, compile, graphs
from tilestream.sparse.cpu import CpuProgram
from tilestream.sparse.graphs import GraphSet
from tilestream.sparse.reproduce import models
from tilestream.sparse.reproduce.models import Case
from tilestream.sparse.reproduce.study import Cell, Study

NOTES = (
    "The fastest of five runs in float64, on a machine that others used as well: differences below 10 % mean little. "
    "Cycles are the simulator's for the same program.",
    "Unfused loops are as fast as torch.sparse on the large graph. On Cora they are slower: its 1,433 features make "
    "the products with dense weights most of the work, for which torch has a library.",
    "Fusing a layer gains nothing here. What the simulator's cycles gain is that operators run side by side, and one "
    "core runs nothing side by side; what a core could gain, the trip of A X through memory, is lost again since the "
    "product with the weights then goes row by row.",
)


def best(run: Callable[[], object], times: int = 5) -> float:
    """Milliseconds of the fastest of some runs, after one that does not count."""
    run()
    found = []
    for _ in range(times):
        began = time.perf_counter()
        run()
        found.append(1000 * (time.perf_counter() - began))
    return min(found)


def by_scipy(name: str, case: Case) -> Callable[[], object]:
    """The same model in NumPy and scipy."""
    import numpy as np

    a, x = case.inputs
    matrix = scipy.sparse.csr_matrix((a.values().numpy(), a.col_indices().numpy(), a.crow_indices().numpy()), a.shape)
    features = x.numpy()
    p = {n: t.detach().numpy() for n, t in case.module.named_parameters()}

    def gcn() -> object:
        hidden = np.maximum(matrix @ features @ p["weight1"] + p["bias1"], 0)
        logits = matrix @ hidden @ p["weight2"] + p["bias2"]
        powers = np.exp(logits - logits.max(1, keepdims=True))
        return powers / powers.sum(1, keepdims=True)

    def sage() -> object:
        hidden = features
        for n in ("1", "2"):
            near = matrix @ hidden @ p[f"weight_near{n}"] + p[f"bias_near{n}"]
            hidden = np.maximum(hidden @ p[f"weight_self{n}"] + p[f"bias_self{n}"] + near, 0)
        return hidden

    return gcn if name == "GCN" else sage


def rows(graph: GraphSet) -> list[dict[str, Cell]]:
    """A row a model."""
    made = []
    for name, make in (("GCN", models.gcn), ("GraphSAGE", models.graphsage)):
        case = make(graph)
        row: dict[str, Cell] = {"model": name, "graph": graph.name}
        with torch.no_grad():
            wanted = case.module(*case.inputs)
            row["torch.sparse"] = best(lambda case=case: case.module(*case.inputs))
        row["scipy"] = best(by_scipy(name, case))
        ways: list[tuple[str, Any]] = [("unfused", "none"), ("fused layers", case.partial())]
        for column, fuse in ways:
            program = compile(case.module, *case.inputs, schedule=Schedule(fuse=fuse))
            loops = CpuProgram(program)
            loops.run(*case.inputs)
            result = min((loops.run(*case.inputs) for _ in range(5)), key=lambda one: one.seconds)
            error = float((result.output - wanted).abs().max() / wanted.abs().max())
            row |= {column: 1000 * result.seconds, f"{column}, error": error}
            row[f"{column}, cycles"] = program.run(*case.inputs, values=False).cycles
        print(json.dumps(row), flush=True)
        made.append(row)
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cora", type=Path)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Sparse")
    found = rows(graphs.cora(given.cora)) if given.cora else []
    links = graphs.uniform(given.nodes, 10 / given.nodes)
    found += rows(GraphSet(f"random, {given.nodes:,} nodes", links, 128, 16, real=False))
    if given.out:
        study = Study(
            "cpu", "Loops on one core", "torch.sparse and scipy, milliseconds, one thread", tuple(found), NOTES
        )
        given.out.write_text(json.dumps(study.json(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
