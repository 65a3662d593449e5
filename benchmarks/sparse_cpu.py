"""Programs as loops on one core, beside torch.sparse and scipy: GCN and GraphSAGE, unfused, by layers, as one region.

python benchmarks/sparse_cpu.py [--cora FILE] [--nodes N] [--rounds N] [--out FILE]: milliseconds, in float64.
"""

from __future__ import annotations

import argparse
import json
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import scipy.sparse
import torch

from tilestream.errors import SparseError
from tilestream.sparse import Schedule, compile, graphs
from tilestream.sparse.cpu import CpuProgram
from tilestream.sparse.expected import estimate_program
from tilestream.sparse.graphs import GraphSet
from tilestream.sparse.program import Program
from tilestream.sparse.reproduce import models
from tilestream.sparse.reproduce.models import Case
from tilestream.sparse.reproduce.study import Cell, Study

MOST_CYCLES = 7e8
"""What is expected to take more is not simulated; its cycles are the estimate."""
NOTES = (
    "Milliseconds of processor time of the one thread that runs, in float64, the least of all rounds; each round runs "
    "every way once. Other work shared the machine's memory: differences below 5 % mean little. Cycles are the "
    "simulator's for the same program, or estimated where there would be more than 7e8.",
    "What fusing a layer gains: what lies between its operators is neither written nor read again. By bytes, on the "
    "large graph: the neighbours' features are 1.02 GB, the same either way. Unfused GCN moves 1.7 GB (A X is 102 MB, "
    "which is fetched, written and read), fused 1.2 GB: 1.4x at most, where the memory is the limit. So fusion cannot "
    "gain the simulator's factors on a core, where nothing runs side by side.",
    "One region computes the first layer again for every neighbour, here as in the simulator.",
)


def clocked(run: Callable[[], object]) -> float:
    """Milliseconds of this thread's processor time."""
    began = time.thread_time()
    run()
    return 1000 * (time.thread_time() - began)


def by_scipy(name: str, case: Case) -> Callable[[], object]:
    """The same model in NumPy and scipy."""
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


def cycles(case: Case, program: Program) -> int:
    expected = estimate_program(program, case.inputs).cycles
    return round(expected) if expected > MOST_CYCLES else program.run(*case.inputs, values=False).cycles


def row(name: str, case: Case, graph: GraphSet, rounds: int) -> dict[str, Cell]:
    """One model on one graph.

    Raises:
        SparseError: values that are not PyTorch's.
    """
    fusions = {"unfused": "none", "layers": case.partial(), "one region": "all"}
    programs = {n: compile(case.module, *case.inputs, schedule=Schedule(fuse=f)) for n, f in fusions.items()}
    loops = {n: CpuProgram(program) for n, program in programs.items()}
    ways = {
        "torch.sparse": lambda: clocked(lambda: case.module(*case.inputs)),
        "scipy": lambda: clocked(by_scipy(name, case)),
        **{n: lambda one=one: 1000 * one.run(*case.inputs).seconds for n, one in loops.items()},
    }
    with torch.no_grad():
        wanted = case.module(*case.inputs)
        worst = max(float((one.run(*case.inputs).output - wanted).abs().max()) for one in loops.values())
        error = worst / float(wanted.abs().max())
        if not error < 1e-12:
            raise SparseError(f"{name} on {graph.name} is off by {error:.1e}", "report the program")
        for way in ways.values():
            way()
        least = {n: min(times) for n, times in zip(ways, zip(*_rounds(ways, rounds), strict=True), strict=True)}
    counted = {n: cycles(case, program) for n, program in programs.items()}
    by_time, by_cycles = sorted(loops, key=least.__getitem__), sorted(loops, key=counted.__getitem__)
    return {
        "model": name,
        "graph": graph.name,
        "torch.sparse": least["torch.sparse"],
        "scipy": least["scipy"],
        **{n: least[n] for n in loops},
        "unfused / torch.sparse": least["unfused"] / least["torch.sparse"],
        "layers gain": least["unfused"] / least["layers"],
        **{f"{n}, cycles": counted[n] for n in loops},
        "layers gain, cycles": counted["unfused"] / counted["layers"],
        "same order": by_time == by_cycles,
        "error": error,
    }


def _rounds(ways: dict[str, Callable[[], float]], rounds: int) -> list[list[float]]:
    """A list of times a round."""
    return [[way() for way in ways.values()] for _ in range(rounds)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cora", type=Path)
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", message="Sparse")
    links = graphs.uniform(given.nodes, 10 / given.nodes)
    sets = [graphs.load("cora", given.cora), GraphSet(f"random, {given.nodes:,} nodes", links, 128, 16, real=False)]
    found = []
    for graph in sets:
        for name, make in (("GCN", models.gcn), ("GraphSAGE", models.graphsage)):
            found.append(row(name, make(graph), graph, given.rounds))
            print(json.dumps(found[-1]), flush=True)
    if given.out:
        study = Study(
            "cpu", "Loops on one core", "torch.sparse and scipy, milliseconds, one thread", tuple(found), NOTES
        )
        given.out.write_text(json.dumps(study.json(), indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
