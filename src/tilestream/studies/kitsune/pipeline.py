"""A subgraph as a spatial pipeline: its stages and the ring queues between them (Kitsune 3.2)."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum

from tilestream.plan.spatial.operators import Kind, Operator, OperatorGraph
from tilestream.plan.spatial.selection import SfNode
from tilestream.simulator.workload import Engine

PRODUCTS = (Kind.LINEAR, Kind.BMM, Kind.ATTENTION)


class Half(StrEnum):
    """Which part of a reduction a stage does (Alg. 1: SplitReduction)."""

    WHOLE = "whole"
    PARTIAL = "partial"  # sums what its own tiles hold
    FINAL = "final"  # sums the partial results of all CTAs, a tree of queues


@dataclass(frozen=True)
class Stage:
    """One kernel of the pipeline: ``ops`` by name, the first with its epilogue behind it."""

    name: str
    ops: tuple[str, ...]
    engine: Engine
    half: Half = Half.WHOLE


@dataclass(frozen=True)
class Ring:
    """A queue: ``value`` streams from ``producer`` to every one of ``consumers`` (several: multicast).

    ``bytes`` are those of the whole value; ``value`` is empty where partial sums pass.
    """

    producer: str
    consumers: tuple[str, ...]
    value: str
    bytes: float


@dataclass(frozen=True)
class Spatial:
    """``node`` as a pipeline. ``ctas`` and the tiles' ``rows`` and ``columns`` are empty and 0 until chosen.

    ``limit`` says what bounds its rate by Alg. 2: a stage's name, ``dram`` or ``l2``.
    """

    node: SfNode
    stages: tuple[Stage, ...]
    rings: tuple[Ring, ...] = ()
    ctas: dict[str, int] = field(default_factory=dict)
    rows: int = 0
    columns: int = 0
    limit: str = ""

    def stage(self, name: str) -> Stage:
        return next(s for s in self.stages if s.name == name)

    def finals(self) -> dict[str, Stage]:
        """The final stage of each operator that is split."""
        return {s.ops[0]: s for s in self.stages if s.half is Half.FINAL}

    def holder(self, op: str) -> Stage:
        """The stage where ``op`` streams: its only one, or the one of its partial sums."""
        return next(s for s in self.stages if op in s.ops and s.half is not Half.FINAL)


def engine_of(ops: list[Operator]) -> Engine:
    """TENSOR as soon as one operator needs tensor cores: its epilogue runs in the same CTA."""
    return Engine.TENSOR if any(op.kind in PRODUCTS for op in ops) else Engine.SIMT


def one_stage_an_operator(node: SfNode, graph: OperatorGraph) -> Spatial:
    """Where design starts: every operator a stage, no queues yet."""
    return Spatial(node, tuple(Stage(name, (name,), engine_of([graph[name]])) for name in node.ops))


def one_stage(node: SfNode, graph: OperatorGraph) -> Spatial:
    """Vertical fusion: all operators in turn in the same CTAs."""
    return Spatial(node, (Stage(node.name, node.ops, engine_of([graph[name] for name in node.ops])),))
