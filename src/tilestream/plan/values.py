"""What operators of a graph read and write in memory: values, in bytes, looked at through views."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import inf

import torch
from torch import fx

from tilestream.graph.costs.table import FILLS, Eager, Kind, row
from tilestream.graph.costs.work import elements, looked_up, size
from tilestream.graph.nodes import computes, is_sym, packet, value


@dataclass(frozen=True)
class Read:
    """An operand: the node that holds its data, the bytes of it that are meant, each once."""

    node: fx.Node
    bytes: float


def works(node: fx.Node) -> bool:
    """Whether an operator takes a kernel's time: constants are made where they are used."""
    return computes(node) and packet(node) not in FILLS


def results(node: fx.Node) -> list[tuple[fx.Node, torch.Tensor]]:
    """The tensors that an operator makes, each with the node that stands for it; but for those that nobody takes."""
    made = node.meta.get("val")
    if isinstance(made, torch.Tensor):
        return [(node, made)]
    parts = [user for user in node.users if user.target is operator.getitem]
    return [(part, tensor) for part in parts if (tensor := value(part)) is not None]


def producer(held: fx.Node) -> fx.Node | None:
    """The operator that makes what ``held`` stands for; None for inputs, parameters and constants."""
    if held.op != "call_function":
        return None
    made = held if computes(held) else held.args[0]
    return made if isinstance(made, fx.Node) and works(made) else None


def reads(node: fx.Node) -> list[Read]:
    """The operands of an operator that are tensors in memory. Of a table, the rows that are looked up."""
    if row(packet(node)).kind is Kind.FILL:
        return []
    found = []
    for position, operand in enumerate(node.all_input_nodes):
        for read in _read(operand):
            most = _touched(node) * _itemsize(read.node) if position == 0 else read.bytes
            found.append(Read(read.node, min(read.bytes, most)))
    return found


def _touched(node: fx.Node) -> float:
    """Elements of its first operand that an operator reads at most: of a table, what is looked up."""
    entry = row(packet(node))
    if entry.kind is Kind.GATHER:
        return looked_up(node)
    return elements(node) if entry.eager is Eager.INDEX_GRADIENT else inf


def _read(operand: fx.Node) -> Iterator[Read]:
    """What an operand holds: nothing for sizes and constants that are made in place."""
    meant = value(operand)
    if meant is None or is_sym(operand):
        return
    least = size(meant)
    while not _holds(operand):
        if not operand.all_input_nodes:
            return
        operand = operand.all_input_nodes[0]
        seen = value(operand)
        least = min(least, size(seen)) if seen is not None else least
    if operand.op == "call_function" and producer(operand) is None:
        return
    yield Read(operand, least * _itemsize(operand))


def _holds(node: fx.Node) -> bool:
    """Whether a node stands for data of its own, and not for a view of another's."""
    if node.op != "call_function" or computes(node):
        return True
    return node.target is operator.getitem and isinstance(node.args[0], fx.Node) and computes(node.args[0])


def _itemsize(node: fx.Node) -> float:
    held = value(node)
    return float(held.element_size()) if held is not None else 0.0


class Readers:
    """Who reads each value of a graph."""

    def __init__(self, nodes: Sequence[fx.Node]) -> None:
        self._of: dict[fx.Node, set[fx.Node]] = {}
        for node in nodes:
            if node.op == "output":
                found = [read for operand in node.all_input_nodes for read in _read(operand)]
            else:
                found = reads(node) if works(node) else []
            for read in found:
                self._of.setdefault(read.node, set()).add(node)

    def __getitem__(self, held: fx.Node) -> set[fx.Node]:
        return self._of.get(held, set())


@dataclass(frozen=True)
class Moved:
    """What operators, run together, read and write: bytes of each value by name."""

    reads: tuple[tuple[str, float], ...]
    writes: tuple[tuple[str, float], ...]


def moved(nodes: Sequence[fx.Node], readers: Readers) -> Moved:
    """Distinct bytes of what ``nodes`` take from elsewhere, and of what others read of theirs, or nobody does."""
    inside = set(nodes)
    taken: dict[str, float] = {}
    left: dict[str, float] = {}
    for node in nodes:
        for read in reads(node):
            if producer(read.node) not in inside:
                taken[read.node.name] = max(taken.get(read.node.name, 0.0), read.bytes)
        for held, tensor in results(node):
            if not readers[held] <= inside or not readers[held]:
                left[held.name] = size(tensor) * tensor.element_size()
    return Moved(tuple(taken.items()), tuple(left.items()))
