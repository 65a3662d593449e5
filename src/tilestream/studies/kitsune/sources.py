"""What memory an fx node stands for: views, conversions and partial updates name the values that hold their data."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from tilestream.graph.costs.table import UPDATES
from tilestream.graph.nodes import packet
from tilestream.graph.nodes import value as tensor
from tilestream.studies.kitsune.compiler.free import FOLDED, is_free, is_operation, result


@dataclass(frozen=True)
class Source:
    """A node that makes data, and how many of its elements are meant."""

    node: str
    elements: float


class Sources:
    """The sources of every node of a graph, and of the backward graph after it (which names saved nodes alike)."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[Source, ...]] = {}

    def read(self, graph: fx.Graph) -> None:
        for node in graph.nodes:
            if node.op != "output" and node.name not in self.of:
                self.of[node.name] = self._find(node)

    def __getitem__(self, node: fx.Node) -> tuple[Source, ...]:
        return self.of[node.name]

    def _find(self, node: fx.Node) -> tuple[Source, ...]:
        own = tensor(node)
        here = (Source(result(node), elements(own)),) if own is not None else ()
        if not is_free(node):
            return here
        if not node.meta.get(FOLDED, True):
            return ()
        first = node.all_input_nodes[0]
        if node.target is operator.getitem:
            return here if is_operation(first) else self._shrunk(node, first)
        kind = packet(node)
        if kind is torch.ops.aten.copy:  # copy(target, new): all of it is new
            return self[node.all_input_nodes[1]]
        if kind in UPDATES:
            new = node.all_input_nodes[1]
            before, part = tensor(first), tensor(new)
            assert before is not None and part is not None
            left = 1 - elements(part) / max(1.0, elements(before))
            return (*(Source(s.node, s.elements * left) for s in self[first]), *self[new])
        return self._shrunk(node, first)

    def _shrunk(self, node: fx.Node, first: fx.Node) -> tuple[Source, ...]:
        """A view that is smaller than what it views reads its part; an expanded one reads each element once."""
        whole = first if tensor(first) is not None else first.all_input_nodes[0]
        before, after = tensor(whole), tensor(node)
        if before is None or after is None:  # split and unbind make tuples: the parts that follow are shares
            return self[first]
        share = min(1.0, scalars(after) / max(1.0, scalars(before)))
        if share == 1.0:
            return self[first]
        return tuple(Source(s.node, s.elements * share) for s in self[first])


def elements(value: torch.Tensor) -> float:
    return float(prod(value.shape))


def scalars(value: torch.Tensor) -> float:
    """Elements, a complex one as two: views change between the two."""
    return elements(value) * (2 if value.dtype.is_complex else 1)
