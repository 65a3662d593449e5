"""The applications as programs: how each is compiled unfused, by layers, and as one region."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tilestream.apps.sparse import GCN, SAE, GraphSAGE
from tilestream.apps.sparse.gcn import sparse_weight
from tilestream.sparse.expected import estimate_program
from tilestream.sparse.frontend import compile
from tilestream.sparse.graphs import GraphSet
from tilestream.sparse.program import Program
from tilestream.sparse.reproduce.paper import FUSIONS
from tilestream.sparse.schedule import Schedule
from tilestream.sparse.storage import Format

DCSR = Format(("compressed", "compressed"))


@dataclass(frozen=True)
class Case:
    """A module with its inputs, the formats of what is stored sparse, and after which operators a layer ends.

    ``orders``: by fusion, the index orders of the released kernels, where they are not what the compiler would choose.
    """

    name: str
    module: nn.Module
    inputs: tuple[Any, ...]
    formats: dict[str, Format]
    layers: Callable[[int], tuple[int, ...]]
    orders: Mapping[str, Mapping[str, tuple[str, ...]]] = field(default_factory=dict)

    def compile(self, fusion: str, **choices: Any) -> Program:
        """``unfused``: a region an operator; ``partial``: one a layer; ``full``: one for all. ``layer 1`` (or 2, ...)
        fuses that layer alone."""
        if fusion.startswith("layer "):
            groups = self.alone(int(fusion.split()[1]))
            return self._compile(groups, order=self._orders(groups), **choices)
        choices = {"order": dict(self.orders.get(fusion, {})) or None, **choices}
        if fusion == "partial":
            return self._compile(self.partial(), **choices)
        return self._compile("none" if fusion == "unfused" else "all", **choices)

    def partial(self) -> tuple[tuple[str, ...], ...]:
        """The operators of each layer."""
        regions = list(dict.fromkeys(s.group for r in self._compile("none").regions for s in r.einsums))
        edges = (0, *self.layers(len(regions)), len(regions))
        return tuple(tuple(regions[a:b]) for a, b in zip(edges, edges[1:], strict=False))

    def alone(self, layer: int) -> tuple[tuple[str, ...], ...]:
        """The operators of one layer, from 1, and every other operator for itself."""
        regions: list[tuple[str, ...]] = []
        for index, group in enumerate(self.partial(), start=1):
            regions += [group] if index == layer else [(name,) for name in group]
        return tuple(regions)

    def _orders(self, groups: tuple[tuple[str, ...], ...]) -> dict[str, tuple[str, ...]] | None:
        """The orders of the released kernels, of operators and of layers, that regions of these operators have."""
        known = {**self.orders.get("unfused", {}), **self.orders.get("partial", {})}
        names = (group[0] if len(group) == 1 else f"{group[0]}..{group[-1]}" for group in groups)
        return {name: known[name] for name in names if name in known} or None

    def _compile(self, fuse: Any, **choices: Any) -> Program:
        schedule = Schedule(fuse=fuse, **choices)
        return compile(self.module, *self.inputs, formats=self.formats, schedule=schedule)

    def error(self, made: Any) -> float:
        """Largest difference from PyTorch in float64, as a share of the largest value; a graph too large to be
        densified is multiplied by torch's own sparse product."""
        with torch.no_grad():
            dense = self.module(*(x.to_dense() if _small(x) else x for x in self.inputs))
        wanted = dense if isinstance(dense, tuple) else (dense,)
        worst = 0.0
        for got, want in zip(made.outputs, wanted, strict=True):
            got = got if got.layout == torch.strided else got.to_dense()
            worst = max(worst, float((got - want).abs().max()) / max(1.0, float(want.abs().max())))
        return worst


def _small(x: torch.Tensor) -> bool:
    return x.layout != torch.strided and x.shape.numel() < 100_000_000


_NEAR, _ROWS = ("i", "j", "k"), ("i", "k", "j")

GCN_ORDERS = {
    "unfused": {"matmul": _NEAR, "matmul_1": _ROWS, "matmul_3": _ROWS},
    "partial": {"matmul..relu": ("i", "l", "k", "j")},
    "full": {"matmul..softmax": ("i", "l", "n", "m", "k", "j")},
}
"""Unfused, A X runs over neighbours innermost; fused, it gives rows. That is what the released cycles of Cora show: one
pass of the unfused product costs (edges + nodes) x features, one of the fused product edges x (features + 1)."""

ROW_ORDERS = {
    "unfused": {"matmul": _ROWS, "matmul_1": _ROWS, "matmul_3": _ROWS},
    "partial": {"matmul..relu": ("i", "l", "k", "j")},
    "full": GCN_ORDERS["full"],
}
"""As SAM's row-wise product: a row of X for each edge."""

SAGE_ORDERS = {
    "unfused": {"matmul": _ROWS, "matmul_1": _NEAR, "matmul_2": _ROWS, "matmul_3": _ROWS, "matmul_5": _ROWS},
    "full": {"matmul..relu_1": ("i", "l", "n", "o", "m", "k", "j")},
}


@dataclass(frozen=True)
class Measured:
    """``cycles`` of a program; ``how``: simulated or estimated. ``error`` is None where nothing was run."""

    cycles: int
    flops: int
    bytes: int
    how: str
    error: float | None


def measure(case: Case, program: Program, most_cycles: float, **run: Any) -> Measured:
    """Simulate a program that is expected to take at most ``most_cycles``; otherwise only what is expected of it."""
    expected = estimate_program(program, case.inputs)
    if expected.cycles > most_cycles:
        return Measured(round(expected.cycles), round(expected.flops), round(expected.bytes), "estimated", None)
    made = program.run(*case.inputs, **run)
    return Measured(made.cycles, made.flops, made.bytes, "simulated", case.error(made))


def features(nodes: int, width: int, seed: int = 1) -> torch.Tensor:
    """float64 [nodes, width], dense, no zeros."""
    random = torch.Generator().manual_seed(seed)
    return torch.rand(nodes, width, generator=random, dtype=torch.float64) + 0.1


def gcn(graph: GraphSet, density: float = 0.4, width: int = 0) -> Case:
    module = GCN(width or graph.features, classes=max(2, graph.classes), density=density)
    with torch.no_grad():  # logits of about one: a softmax of zeros and ones would hide errors
        module.weight2.div_(max(1.0, graph.edges / graph.nodes))
    formats = {"adjacency": DCSR, "weight1": DCSR, "weight2": DCSR}
    inputs = (graph.torch(), features(graph.nodes, width or graph.features) / max(1.0, graph.edges / graph.nodes))
    return Case(f"GCN on {graph.name}", module, inputs, formats, lambda n: (n // 2,), GCN_ORDERS)


def graphsage(graph: GraphSet, density: float = 0.4) -> Case:
    module = GraphSAGE(graph.features, classes=max(2, graph.classes), density=density)
    weights = [f"weight_{kind}{layer}" for kind in ("self", "near") for layer in (1, 2)]
    formats = {"adjacency": DCSR, **dict.fromkeys(weights, DCSR)}
    inputs = (graph.torch(), features(graph.nodes, graph.features))
    return Case(f"GraphSAGE on {graph.name}", module, inputs, formats, lambda n: (n // 2,), SAGE_ORDERS)


class _Walks(nn.Module):
    """``A (A X)`` with everything sparse: sums of fibers that hold the same coordinates more often than chance."""

    def forward(self, adjacency: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return torch.matmul(torch.matmul(adjacency, adjacency), x)


def walks(graph: GraphSet, width: int = 64) -> Case:
    """Two steps over a graph and sparse features."""
    x = sparse_weight(graph.nodes, width, 0.1, torch.Generator().manual_seed(0))
    formats = {"adjacency": DCSR, "x": DCSR}
    return Case(f"A A X, sparse, on {graph.name}", _Walks(), (graph.torch(), x), formats, lambda n: (1,))


def sae(pixels: int, hidden: int, batch: int, density: float) -> Case:
    module = SAE(pixels, hidden, density)
    formats = {"encoder": DCSR, "decoder": DCSR}
    return Case("SAE", module, (features(batch, pixels),), formats, lambda n: (3,))


__all__ = ["DCSR", "FUSIONS", "Case", "Measured", "features", "gcn", "graphsage", "measure", "sae", "walks"]
