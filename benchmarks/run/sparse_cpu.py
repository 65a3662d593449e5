"""Whole calls of the CPU loops beside torch.sparse (CSR), PyTorch Geometric and Inductor, in float32.

    python -m benchmarks.run.sparse_cpu [--part graphs|pyg] [--rounds N] [--seconds S] [--features N] [--out FOLDER]

A call is what a user calls: from tensors to the result. Every round calls every way once, in turn, on the threads that
PyTorch has; figures are medians over the rounds, in milliseconds. ``graphs``: GCN and GraphSAGE of ``apps.sparse`` with
a sparse adjacency; ``pyg``: six models of PyTorch Geometric from edge indices, which their programs have compiled in.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tilestream.bench.environment import environment
from tilestream.errors import SparseError
from tilestream.sparse import compile, graphs
from tilestream.sparse.cpu import CpuProgram
from tilestream.sparse.graphs import GraphSet
from tilestream.sparse.reproduce import models
from tilestream.sparse.reproduce.study import Cell, Study

HIDDEN, CLASSES, HEADS = 16, 7, 2
CORA = 2708, 10556, 1433
"""Nodes, edges and features of Cora; the graphs here are random with these."""


class Layers(nn.Module):
    """Convolutions of PyTorch Geometric with a relu between them."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = torch.relu(layer(x, edges))
        return self.layers[-1](x, edges)


def _mlp(inner: int, outer: int) -> nn.Module:
    return nn.Sequential(nn.Linear(inner, outer), nn.ReLU(), nn.Linear(outer, outer))


def pyg(features: int) -> dict[str, Layers]:
    """The six models, two layers each."""
    import torch_geometric.nn as g  # pyright: ignore[reportMissingImports]

    torch.manual_seed(0)
    made = {
        "GCN": (g.GCNConv(features, HIDDEN), g.GCNConv(HIDDEN, CLASSES)),
        "SAGE": (g.SAGEConv(features, HIDDEN), g.SAGEConv(HIDDEN, CLASSES)),
        "GIN": (g.GINConv(_mlp(features, HIDDEN)), g.GINConv(_mlp(HIDDEN, CLASSES))),
        "GAT": (g.GATConv(features, HIDDEN // HEADS, heads=HEADS), g.GATConv(HIDDEN, CLASSES)),
        "Transformer": (
            g.TransformerConv(features, HIDDEN // HEADS, heads=HEADS),
            g.TransformerConv(HIDDEN, CLASSES),
        ),
        "EdgeConv": (g.EdgeConv(_mlp(2 * features, HIDDEN)), g.EdgeConv(_mlp(2 * HIDDEN, CLASSES))),
    }
    return {name: Layers(*layers).eval() for name, layers in made.items()}


def medians(ways: Mapping[str, Callable[[], object]], rounds: int, seconds: float) -> dict[str, float]:
    """Milliseconds a call, by way."""
    times: dict[str, list[float]] = {name: [] for name in ways}
    for run in ways.values():
        run()
        run()
    began = time.perf_counter()
    while len(times[next(iter(ways))]) < rounds and time.perf_counter() - began < seconds:
        for name, run in ways.items():
            start = time.perf_counter()
            run()
            times[name].append(1000 * (time.perf_counter() - start))
    return {name: statistics.median(found) for name, found in times.items()}


def row(
    label: Mapping[str, Cell], module: nn.Module, inputs: tuple[Any, ...], peers: Mapping[str, Any], given: Any
) -> dict[str, Cell]:
    """One model on one graph.

    Raises:
        SparseError: values that are not PyTorch's.
    """
    began = time.perf_counter()
    loops = CpuProgram(compile(module, *inputs))
    made = loops.run(*inputs).output
    first = time.perf_counter() - began
    wanted = module(*inputs)
    error = float((made - wanted).abs().max() / wanted.abs().max())
    if not error < 1e-4:
        raise SparseError(f"{label} is off by {error:.1e}", "report the program")
    found = medians(
        {**{n: (lambda p=p: p(*inputs)) for n, p in peers.items()}, "loops": lambda: loops.run(*inputs)},
        given.rounds,
        given.seconds,
    )
    ratios = {f"loops / {name}": found["loops"] / found[name] for name in peers}
    return {**label, **found, **ratios, "first call, s": first, "error": error}


def on_graphs(given: argparse.Namespace) -> list[dict[str, Cell]]:
    nodes, edges, features = CORA
    sets = [
        GraphSet("2,708 nodes", graphs.uniform(nodes, edges / nodes**2), features, CLASSES, real=False),
        GraphSet("100,000 nodes", graphs.uniform(100_000, 10 / 100_000), 128, 16, real=False),
    ]
    found = []
    for graph in sets:
        for name, make in (("GCN", models.gcn), ("GraphSAGE", models.graphsage)):
            case = make(graph)
            module, inputs = case.module.float(), tuple(x.float() for x in case.inputs)
            label = {"model": name, "graph": graph.name, "edges": graph.edges, "features": graph.features}
            found.append(row(label, module, inputs, {"torch.sparse": module}, given))
            print(json.dumps(found[-1]), flush=True)
    return found


def on_pyg(given: argparse.Namespace) -> list[dict[str, Cell]]:
    nodes, edges, wide = CORA
    torch.manual_seed(0)
    links = torch.randint(0, nodes, (2, edges))
    found = []
    for features in given.features or (128, wide):
        x = torch.rand(nodes, features)
        for name, module in pyg(features).items():
            torch._dynamo.reset()
            peers = {"PyTorch": module, "Inductor": torch.compile(module)}
            label = {"model": name, "features": features}
            found.append(row(label, module, (x, links), peers, given))
            print(json.dumps(found[-1]), flush=True)
    return found


NOTES = (
    "Milliseconds of whole calls, float32, medians; every round calls every way once. The loops' call has packing and "
    "everything else in it, and runs with `fuse=auto`.",
    "What a call costs at least: GCN on 100,000 nodes reads 51 MB of features and makes a product of 0.4 GFLOP, about "
    "6 ms on two cores. torch.sparse multiplies with the adjacency first and fetches 512 MB of neighbours' features; "
    "the loops multiply with the weights first where that takes fewer operations.",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=("graphs", "pyg"), default="graphs")
    parser.add_argument("--rounds", type=int, default=31)
    parser.add_argument("--seconds", type=float, default=4.0, help="for the rounds of one model, at most")
    parser.add_argument("--features", type=int, action="append", help="of pyg; 128 and 1,433 unless given")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    warnings.filterwarnings("ignore")
    began = time.perf_counter()
    with torch.no_grad():
        found = on_graphs(given) if given.part == "graphs" else on_pyg(given)
    where = f"{torch.get_num_threads()} threads of a shared machine, torch {torch.__version__}."
    notes = (*NOTES[: 2 if given.part == "graphs" else 1], where)
    name, title, source = {
        "graphs": ("cpu", "CPU loops on graphs", "torch.sparse (CSR), whole calls in milliseconds"),
        "pyg": (
            "cpu_pyg",
            "CPU loops of PyTorch Geometric's models",
            "PyTorch and Inductor, whole calls in milliseconds",
        ),
    }[given.part]
    if given.out:
        study = Study(name, title, source, tuple(found), notes, time.perf_counter() - began)
        given.out.mkdir(parents=True, exist_ok=True)
        path = given.out / f"{name}.json"
        made = {**study.json(), "environment": environment()}
        path.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
