"""What memory an fx node stands for: views, conversions and partial updates name the values that hold their data."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod

import torch
from torch import fx

from tilestream.graph.costs.table import CONVERSIONS, UPDATES
from tilestream.graph.nodes import ASSERTIONS, VIEWS, packet
from tilestream.graph.nodes import value as tensor


@dataclass(frozen=True)
class Source:
    """A node that makes data, and how many of its elements are meant."""

    node: str
    elements: float


FOLDED = "tilestream_folded"
"""Key in ``meta`` of a node that belongs to its neighbour: True where it stands for its operand, else it is nothing."""


def is_free(node: fx.Node) -> bool:
    """Whether the node computes nothing of its own."""
    if node.op != "call_function":
        return False
    if FOLDED in node.meta:
        return True
    kind = packet(node)
    return node.target is operator.getitem or kind in VIEWS or kind in CONVERSIONS or kind in UPDATES


def is_operation(node: fx.Node) -> bool:
    """Whether the node computes or moves something."""
    return node.op == "call_function" and not is_free(node) and packet(node) not in ASSERTIONS


def result(node: fx.Node) -> str:
    """The name of what a node makes; a result of several is ``name.0``, ``name.1``."""
    if node.target is operator.getitem and is_operation(node.all_input_nodes[0]):
        return f"{node.all_input_nodes[0].name}.{node.args[1]}"
    return node.name


def users(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that compute with what ``node`` makes, looking through views, and the graph's output."""
    for user in node.users:
        if is_free(user):
            yield from users(user)
        elif packet(user) not in ASSERTIONS:
            yield user


def base(node: fx.Node) -> fx.Node:
    """The node behind views of one operand."""
    while node.op == "call_function" and not is_operation(node):
        node = node.all_input_nodes[0]
    return node


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
