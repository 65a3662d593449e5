"""Which operators run together: exclusion rules, then a library of patterns (Kitsune 3.1).

One exclusion rule is ours and not the paper's: a concatenation of values that are complete in memory (``COMPLETE``).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from tilestream.graph.convexity import Groups, in_order
from tilestream.graph.selection import Exclusion
from tilestream.studies.kitsune.compiler.operators import Kind, Operator, OperatorGraph
from tilestream.studies.kitsune.compiler.patterns import KITSUNE, OTHER, Pattern, letter, streamed

INDEXES = "indexes across all data: no row of its result can be known to depend on few rows of its operands"
COMPLETE = "joins values that are complete in memory: no layer streams into it"
LARGE = "a product outside of the patterns: alone it fills the GPU (bulk-synchronous friendly)"
UNMATCHED = "matches no pattern of the library"
LAYERS = (Kind.LINEAR, Kind.ELEMENTWISE)


@dataclass(frozen=True)
class SfNode:
    """A convex subgraph that spatial or vertical fusion makes one launch of (Kitsune 3.1).

    ``ops`` are names in the graph's order; ``pattern`` is the entry of the library that matched.
    """

    name: str
    ops: tuple[str, ...]
    pattern: str


@dataclass(frozen=True)
class Selection:
    """All operators of a graph: those of ``nodes``, and the rest by name, with a reason each."""

    nodes: tuple[SfNode, ...]
    exclusions: tuple[Exclusion, ...]

    @property
    def fused(self) -> int:
        """Operators in subgraphs: what Table 2 counts."""
        return sum(len(n.ops) for n in self.nodes)

    def units(self, graph: OperatorGraph) -> list[tuple[str, ...]]:
        """Every launch as the names of its operators, in an order in which they can run.

        Raises:
            PlanError: a subgraph is not convex, or two wait for each other.
        """
        return schedule(graph, [n.ops for n in self.nodes])


def schedule(graph: OperatorGraph, groups: Sequence[Sequence[str]]) -> list[tuple[str, ...]]:
    """``groups`` and the operators outside of them, each once, so that producers come first."""
    unit = {name: tuple(g) for g in groups for name in g}
    units = list(dict.fromkeys(unit.get(op.name, (op.name,)) for op in graph))
    order = in_order(units, lambda name: (p.name for p in graph.predecessors(graph[name])))
    return [units[i] for i in order]


def excluded(op: Operator, graph: OperatorGraph, complete: bool = False) -> str:
    """Why ``op`` may not be in any subgraph; empty if it may. ``complete`` as in ``select``."""
    if op.kind in (Kind.GATHER, Kind.SCATTER):
        return INDEXES
    if op.kind is Kind.CAT and not complete and not any(_layer(value, graph) for value in streamed(op, graph)):
        return COMPLETE
    return ""


def _layer(value: str, graph: OperatorGraph) -> bool:
    """Whether a layer of an MLP makes ``value``: a linear, or an activation behind one."""
    producer = graph.producer(value)
    if producer is None or producer.kind not in LAYERS:
        return False
    return producer.kind is Kind.LINEAR or len(streamed(producer, graph)) == 1


def select(
    graph: OperatorGraph,
    library: Sequence[Pattern] = KITSUNE,
    refused: Mapping[str, str] | None = None,
    complete: bool = False,
) -> Selection:
    """Subgraphs of ``graph``, in its order: convex, connected, and none waiting for another that waits for it.

    A match that is not connected becomes several; one that is not convex is cut where it would not be.

    Args:
        refused: operators by name that may be in none for other reasons than the rules, and those.
        complete: whether concatenations of values that are complete in memory may be in a subgraph, as they may by the
            paper's own rules.
    """
    reasons = dict(refused or {})
    matched: dict[str, Pattern] = {}
    groups = Groups({op.name: [s.name for s in graph.successors(op)] for op in graph}, _alone(graph))
    for phase in ("forward", "backward"):
        ops = graph.phase(phase)
        for op in ops:
            if reason := excluded(op, graph, complete):
                reasons.setdefault(op.name, reason)
        text = "".join(OTHER if op.name in reasons else letter(op, graph) for op in ops)
        at = 0
        while at < len(ops):
            pattern, length = _match(text, at, ops, graph, library)
            if pattern is not None:
                _join(ops[at : at + length], groups, graph)
                matched |= dict.fromkeys((op.name for op in ops[at : at + length]), pattern)
            at += length
    found = [tuple(group) for group in groups.all() if len(group) > 1]
    named = [(matched[ops[0]].name, ops) for ops in found]
    nodes = tuple(SfNode(f"{name.replace(' ', '-')}.{i}", ops, name) for i, (name, ops) in enumerate(named))
    inside = {name for ops in found for name in ops}
    outside = [op for op in graph if op.name not in inside]
    return Selection(nodes, tuple(Exclusion(op.name, op.source, reasons.get(op.name, _why(op))) for op in outside))


def _alone(graph: OperatorGraph) -> dict[str, frozenset[str]]:
    """No operator needs another's value whole."""
    return {op.name: frozenset() for op in graph}


def _join(ops: Sequence[Operator], groups: Groups[str], graph: OperatorGraph) -> None:
    """Join the operators of a match that a value connects: one makes and one reads it, or both read it."""
    members = {op.name for op in ops}
    for _ in range(2):  # what a third one keeps apart may be joined once that one is in
        reader: dict[str, str] = {}
        for op in ops:
            for p in graph.predecessors(op):
                if p.name in members:
                    groups.merge(p.name, op.name)
            for value in streamed(op, graph):
                groups.merge(reader.setdefault(value, op.name), op.name)


def _match(
    text: str, at: int, ops: Sequence[Operator], graph: OperatorGraph, library: Sequence[Pattern]
) -> tuple[Pattern | None, int]:
    for pattern in library:
        match = pattern.regex.match(text, at)
        if match and match.end() > at and pattern.holds(ops[at : match.end()], graph):
            return pattern, match.end() - at
    return None, 1


def _why(op: Operator) -> str:
    return LARGE if op.kind in (Kind.LINEAR, Kind.BMM, Kind.ATTENTION) else UNMATCHED
