"""Subgraphs of operators that run as one launch: what they are, what they read and write, whether they are convex."""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from tilestream.errors import PlanError
from tilestream.studies.kitsune.operators import Operator, OperatorGraph


@dataclass(frozen=True)
class SfNode:
    """A convex subgraph that spatial or vertical fusion makes one launch of (Kitsune 3.1).

    ``ops`` are names in the graph's order; ``pattern`` is the entry of the library that matched.
    """

    name: str
    ops: tuple[str, ...]
    pattern: str


@dataclass(frozen=True)
class Exclusion:
    """An operator that stays a kernel of its own, and why."""

    op: str
    reason: str


@dataclass(frozen=True)
class Selection:
    """All operators of a graph: those of ``nodes``, and the rest with a reason each."""

    nodes: tuple[SfNode, ...]
    exclusions: tuple[Exclusion, ...]

    @property
    def fused(self) -> int:
        """Operators in subgraphs: what Table 2 counts."""
        return sum(len(n.ops) for n in self.nodes)

    def units(self, graph: OperatorGraph) -> list[tuple[str, ...]]:
        """Every launch as the names of its operators, in an order in which they can run."""
        return schedule(graph, [n.ops for n in self.nodes])


def schedule(graph: OperatorGraph, groups: Iterable[Sequence[str]]) -> list[tuple[str, ...]]:
    """``groups`` and the operators outside of them, each once, so that producers come first.

    Among what is ready, the graph's order decides.

    Raises:
        PlanError: a group is not convex, or two wait for each other.
    """
    unit: dict[str, tuple[str, ...]] = {name: tuple(g) for g in groups for name in g}
    units = list(dict.fromkeys(unit.get(op.name, (op.name,)) for op in graph))
    place = {name: i for i, ops in enumerate(units) for name in ops}
    before = [{place[p.name] for n in ops for p in graph.predecessors(graph[n])} - {i} for i, ops in enumerate(units)]
    after: dict[int, list[int]] = {i: [] for i in range(len(units))}
    for i, needs in enumerate(before):
        for j in needs:
            after[j].append(i)
    waits = [len(needs) for needs in before]
    ready = [i for i, count in enumerate(waits) if count == 0]
    order: list[tuple[str, ...]] = []
    while ready:
        i = heapq.heappop(ready)
        order.append(units[i])
        for j in after[i]:
            waits[j] -= 1
            if waits[j] == 0:
                heapq.heappush(ready, j)
    if len(order) < len(units):
        stuck = next(units[i] for i, count in enumerate(waits) if count)
        raise PlanError(f"the subgraph of {stuck[0]!r} waits for itself", "cut it where a path leaves and comes back")
    return order


def convex(graph: OperatorGraph, ops: Collection[str]) -> bool:
    """Whether no path leaves ``ops`` and comes back (Tarnawski et al., NeurIPS 2020)."""
    members = set(ops)
    reached: set[str] = set()  # outside operators that depend on a member
    for op in graph:
        before = {p.name for p in graph.predecessors(op)}
        if op.name in members:
            if before & reached:
                return False
        elif before & (members | reached):
            reached.add(op.name)
    return True


def connected(graph: OperatorGraph, ops: Sequence[str], *, siblings: bool = False) -> list[tuple[str, ...]]:
    """``ops`` cut into parts that values join, each in the graph's order.

    Args:
        siblings: operators that read the same result of one inside the group are joined as well (always the case,
            as the producer is a member); with True also those that read the same value from outside.
    """
    members = set(ops)
    root = {name: name for name in ops}

    def find(name: str) -> str:
        while root[name] != name:
            name = root[name]
        return name

    reader: dict[str, str] = {}
    for name in ops:
        op = graph[name]
        for p in graph.predecessors(op):
            if p.name in members:
                root[find(name)] = find(p.name)
        if siblings:
            for operand in op.inputs:
                if not graph.values[operand.value].is_parameter:
                    root[find(name)] = find(reader.setdefault(operand.value, name))
    parts: dict[str, list[str]] = {}
    for name in ops:
        parts.setdefault(find(name), []).append(name)
    return [tuple(p) for p in parts.values()]


def reads(graph: OperatorGraph, ops: Collection[str]) -> dict[str, float]:
    """Distinct bytes that ``ops``, as one launch, read of each value made elsewhere."""
    members = set(ops)
    made = {value for name in members for value in graph[name].outputs}
    most: dict[str, float] = {}
    for name in ops:
        for operand in graph[name].inputs:
            if operand.value not in made:
                most[operand.value] = max(most.get(operand.value, 0.0), operand.bytes)
    return most


def writes(graph: OperatorGraph, ops: Collection[str]) -> dict[str, float]:
    """Bytes that ``ops``, as one launch, write: results that are read elsewhere, or saved, or results of the graph.

    A result that nothing reads is written too: its operator has no other purpose.
    """
    members = set(ops)
    found: dict[str, float] = {}
    for name in ops:
        op = graph[name]
        for value, size in zip(op.outputs, op.output_bytes, strict=True):
            if leaves(graph, op, value, members):
                found[value] = size
    return found


def leaves(graph: OperatorGraph, op: Operator, value: str, members: Collection[str]) -> bool:
    """Whether ``value``, a result of ``op``, is needed outside of ``members``."""
    entry = graph.values[value]
    readers = graph.consumers(value)
    return entry.is_output or entry.saved or not readers or any(r.name not in members for r in readers)
