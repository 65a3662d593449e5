"""Which operators run together: exclusion rules, then the library of patterns (Kitsune 3.1)."""

from __future__ import annotations

from collections.abc import Sequence

from tilestream.errors import PlanError
from tilestream.studies.kitsune.operators import Kind, Operator, OperatorGraph
from tilestream.studies.kitsune.patterns import KITSUNE, OTHER, Pattern, letter, streamed
from tilestream.studies.kitsune.regions import Exclusion, Selection, SfNode, connected, convex, schedule

INDEXES = "indexes across all data: no row of its result can be known to depend on few rows of its operands"
COMPLETE = "joins values that are complete in memory: no layer streams into it"
LARGE = "a product outside of the patterns: alone it fills the GPU (bulk-synchronous friendly)"
UNMATCHED = "matches no pattern of the library"
LAYERS = (Kind.LINEAR, Kind.ELEMENTWISE)


def excluded(op: Operator, graph: OperatorGraph) -> str:
    """Why ``op`` may not be in any subgraph; empty if it may."""
    if op.kind in (Kind.GATHER, Kind.SCATTER):
        return INDEXES
    if op.kind is Kind.CAT and not any(_layer(value, graph) for value in streamed(op, graph)):
        return COMPLETE
    return ""


def _layer(value: str, graph: OperatorGraph) -> bool:
    """Whether a layer of an MLP makes ``value``: a linear, or an activation behind one."""
    producer = graph.producer(value)
    if producer is None or producer.kind not in LAYERS:
        return False
    return producer.kind is Kind.LINEAR or len(streamed(producer, graph)) == 1


def select(graph: OperatorGraph, library: Sequence[Pattern] = KITSUNE) -> Selection:
    """Subgraphs of ``graph``, in its order: convex, connected, and none waiting for another that waits for it.

    A match that is not connected becomes several; one that is not convex is cut where it would not be.
    """
    reasons: dict[str, str] = {}
    found: list[tuple[Pattern, tuple[str, ...]]] = []
    for phase in ("forward", "backward"):
        ops = graph.phase(phase)
        for op in ops:
            if reason := excluded(op, graph):
                reasons[op.name] = reason
        text = "".join(OTHER if op.name in reasons else letter(op, graph) for op in ops)
        at = 0
        while at < len(ops):
            pattern, length = _match(text, at, ops, graph, library)
            if pattern is not None:
                names = [op.name for op in ops[at : at + length]]
                for part in connected(graph, names, siblings=True):
                    found += [(pattern, piece) for piece in _cut(part, graph) if len(piece) > 1]
            at += length
    nodes = _compatible(found, graph)
    inside = {name for node in nodes for name in node.ops}
    return Selection(
        tuple(nodes),
        tuple(Exclusion(op.name, reasons.get(op.name, _why(op))) for op in graph if op.name not in inside),
    )


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


def _cut(ops: Sequence[str], graph: OperatorGraph) -> list[tuple[str, ...]]:
    """``ops`` in convex pieces, each as long as it can be."""
    if convex(graph, ops):
        return [tuple(ops)]
    pieces: list[list[str]] = [[]]
    for name in ops:
        if convex(graph, [*pieces[-1], name]):
            pieces[-1].append(name)
        else:
            pieces.append([name])
    return [part for piece in pieces for part in connected(graph, piece, siblings=True)]


def _compatible(found: Sequence[tuple[Pattern, tuple[str, ...]]], graph: OperatorGraph) -> list[SfNode]:
    """All of ``found`` if they can be put in an order; otherwise those that can, earlier ones first."""
    kept = [ops for _, ops in found]
    if not _ordered(graph, kept):
        kept = []
        for _, ops in found:
            if _ordered(graph, [*kept, ops]):
                kept.append(ops)
    names = {ops: pattern.name for pattern, ops in found}
    return [SfNode(f"{names[ops].replace(' ', '-')}.{i}", ops, names[ops]) for i, ops in enumerate(kept)]


def _ordered(graph: OperatorGraph, groups: Sequence[Sequence[str]]) -> bool:
    try:
        schedule(graph, groups)
    except PlanError:
        return False
    return True
