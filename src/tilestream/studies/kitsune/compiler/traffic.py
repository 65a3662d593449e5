"""Off-chip traffic of a graph when subgraphs of it run as one launch each (Kitsune, Table 2).

Every launch reads each value that it does not make itself once, and writes each of its results that is needed
outside. Values between operators of one launch never leave the chip. What the L2 keeps from one launch to the next
is not credited, neither to the baseline nor to fusion: the sizes of Table 2 would otherwise decide, not the fusion.

``saves=False`` counts as if the forward graph were an inference engine's: what passes inside of a launch is not
written, though the backward graph reads it.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from tilestream.studies.kitsune.compiler.operators import Operator, OperatorGraph


def launch_bytes(graph: OperatorGraph, ops: Sequence[str], saves: bool = True) -> float:
    """Bytes that the operators ``ops``, run as one launch, read from and write to DRAM."""
    return sum(reads(graph, ops).values()) + sum(writes(graph, ops, saves).values())


def traffic(graph: OperatorGraph, units: Iterable[Sequence[str]], saves: bool = True) -> float:
    """Bytes of all launches; ``units`` holds each operator once."""
    return sum(launch_bytes(graph, ops, saves) for ops in units)


def reduction(graph: OperatorGraph, units: Iterable[Sequence[str]], saves: bool = True) -> float:
    """Share of the bulk-synchronous traffic that ``units`` save: 0 to 1."""
    bulk = traffic(graph, [(op.name,) for op in graph])
    return 1 - traffic(graph, units, saves) / bulk if bulk else 0.0


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


def writes(graph: OperatorGraph, ops: Collection[str], saves: bool = True) -> dict[str, float]:
    """Bytes that ``ops``, as one launch, write: results that are read elsewhere, or saved, or results of the graph.

    A result that nothing reads is written too: its operator has no other purpose.
    """
    members = set(ops)
    found: dict[str, float] = {}
    for name in ops:
        op = graph[name]
        for value, size in zip(op.outputs, op.output_bytes, strict=True):
            if leaves(graph, op, value, members, saves):
                found[value] = size
    return found


def leaves(graph: OperatorGraph, op: Operator, value: str, members: Collection[str], saves: bool = True) -> bool:
    """Whether ``value``, a result of ``op``, is needed outside of ``members``."""
    readers = [r for r in graph.consumers(value) if saves or r.phase == op.phase]
    return graph.values[value].is_output or not readers or any(r.name not in members for r in readers)
