"""Off-chip traffic of a graph when subgraphs of it run as one launch each (Kitsune, Table 2).

Every launch reads each value that it does not make itself once, and writes each of its results that is needed
outside. Values between operators of one launch never leave the chip. What the L2 keeps from one launch to the next
is not credited, neither to the baseline nor to fusion: the sizes of Table 2 would otherwise decide, not the fusion.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tilestream.studies.kitsune.operators import OperatorGraph
from tilestream.studies.kitsune.regions import reads, writes


def launch_bytes(graph: OperatorGraph, ops: Sequence[str]) -> float:
    """Bytes that the operators ``ops``, run as one launch, read from and write to DRAM."""
    return sum(reads(graph, ops).values()) + sum(writes(graph, ops).values())


def traffic(graph: OperatorGraph, units: Iterable[Sequence[str]]) -> float:
    """Bytes of all launches; ``units`` holds each operator once."""
    return sum(launch_bytes(graph, ops) for ops in units)


def reduction(graph: OperatorGraph, units: Iterable[Sequence[str]]) -> float:
    """Share of the bulk-synchronous traffic that ``units`` save: 0 to 1."""
    bulk = traffic(graph, [(op.name,) for op in graph])
    return 1 - traffic(graph, units) / bulk if bulk else 0.0
