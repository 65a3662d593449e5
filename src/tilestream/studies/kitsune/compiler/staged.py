"""A subgraph as a pipeline of the IR whose stages are operators of a graph: what the passes of its design change.

At first every operator is a stage. A tile that another stage reads has a queue, one for all who read it (multicast).
Which stages there are, what passes between them and which sums are in halves is said by the pipeline alone.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from tilestream.errors import PlanError
from tilestream.graph.nodes import Unsupported
from tilestream.ir.axes import Loop
from tilestream.ir.derive import sums
from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS, Pipeline, Queue, Stage, TileOp
from tilestream.plan.passes.cleaning import merge_common_ops
from tilestream.simulator.workload import Engine
from tilestream.studies.kitsune.compiler.operators import PRODUCTS, Operator, OperatorGraph
from tilestream.studies.kitsune.compiler.program import written
from tilestream.studies.kitsune.compiler.selection import SfNode
from tilestream.studies.kitsune.lowering.program import Stored
from tilestream.studies.kitsune.lowering.writer import Given

STREAM = "rows"
"""The innermost axis that all stages stream along (``studies.kitsune.lowering.program``): tiles are blocks of it."""
PARTIAL_BYTES = 4
"""Of an element of a partial sum: they are fp32."""


@dataclass(frozen=True, eq=False)
class Staged:
    """``node`` as a pipeline. Two are equal if they are one: what follows from it is remembered.

    Attributes:
        operators: those of each stage by its name, the first with its epilogue behind it. One that two stages have is
            a sum in halves: the later stage adds up what the workers of the first have.
        streams: names of the axes that every stage streams along.
        given, stored: the nodes whose values are the pipeline's inputs, and the results that its outputs are.
        columns: of a product, that a CTA makes at once; 0 until chosen.
        limit: what bounds the rate by Alg. 2: a stage's name, ``dram`` or ``l2``.
    """

    node: SfNode
    pipeline: Pipeline
    operators: Mapping[str, tuple[Operator, ...]]
    streams: tuple[str, ...]
    given: tuple[Given, ...]
    stored: tuple[Stored, ...]
    columns: int = 0
    limit: str = ""

    @cached_property
    def names(self) -> tuple[str, ...]:
        """Of the stages, in order."""
        return tuple(s.name for s in self.pipeline.stages)

    def engine(self, stage: str) -> Engine:
        """TENSOR as soon as one operator needs tensor cores: its epilogue runs in the same CTA."""
        products = not self.is_final(stage) and any(op.kind in PRODUCTS for op in self.operators[stage])
        return Engine.TENSOR if products else Engine.SIMT

    @property
    def vertical(self) -> bool:
        """Whether all operators take turns in the same CTAs, which hold whole rows."""
        return self.pipeline.strategy == "vertical"

    @cached_property
    def finals(self) -> dict[str, str]:
        """The stage that finishes the sum of each operator that is in halves."""
        held: set[str] = set()
        found = {}
        for name in self.names:
            for op in self.operators[name]:
                if op.name in held:
                    found[op.name] = name
                held.add(op.name)
        return found

    def is_final(self, stage: str) -> bool:
        """Whether it adds up partial sums."""
        return self.finals.get(self.operators[stage][0].name) == stage

    def is_partial(self, stage: str) -> bool:
        """Whether it is there for a sum that another stage finishes; a sum that rides on other tiles is none."""
        return self.operators[stage][0].name in self.finals and not self.is_final(stage)

    def holder(self, op: str) -> str:
        """The stage where ``op`` streams."""
        return next(name for name in self.names if any(x.name == op for x in self.operators[name]))

    @cached_property
    def passing(self) -> tuple[tuple[Queue, float], ...]:
        """Every queue, and the bytes of the value that passes; of one worker's part where it is of a sum in halves."""
        tiles = self.pipeline.tiles()
        finals = set(self.finals.values())
        found = []
        for q in self.pipeline.queues:
            each = PARTIAL_BYTES if finals.issuperset(q.consumers) else DTYPE_BYTES[tiles[q.tile].dtype]
            found.append((q, float(each * prod(a.size or 1 for a in tiles[q.tile].axes))))
        return tuple(found)

    def with_stages(self, stages: Sequence[Stage], operators: Mapping[str, tuple[Operator, ...]]) -> Staged:
        """Other stages of the same ops: queues follow from who reads what."""
        stages = tuple(replace(s, ops=tuple(by_pass(s.ops, {loop.axis for loop in s.loops}))) for s in stages)
        made = replace(self.pipeline, stages=stages, queues=tuple(queues(stages)))
        return replace(self, pipeline=made, operators=dict(operators))


def staged(node: SfNode, graph: OperatorGraph, *, vertical: bool = False) -> Staged:
    """``node`` with a stage an operator; ``vertical``: with one for all, whose CTAs take them in turn.

    Raises:
        NotLowered: an operator has no lowering to axes.
    """
    ops = [graph[name] for name in node.ops]
    parts = {node.name: tuple(ops)} if vertical else {op.name: (op,) for op in ops}
    try:
        nodes = {name: [n for op in part for n in op.nodes] for name, part in parts.items()}
        made = written(nodes, graph.recorded.stored)
    except Unsupported as why:
        blamed = next((op for op in ops if why.node is not None and why.node in op.nodes), ops[0])
        raise NotLowered(blamed, node, why.reason) from why
    bodies = {name: list(part) for name, part in made.ops.items()}
    for stored in made.stored:
        bodies[stored.group] += stored.ops
    streams = tuple(a.name for a in made.streams)
    stages = [Stage(name, tuple(part), _loops(part, streams)) for name, part in bodies.items() if part]
    stages = _live(stages)
    taken = {n for s in stages for op in s.ops for v in op.views for n in (v.of, *(at.index for at in v.at or ()))}
    tensors = tuple(t for t in made.tensors if t.name in taken)
    pipeline = Pipeline(node.name, tensors, tuple(stages), tuple(queues(stages)), "vertical" if vertical else "spatial")
    given = tuple(g for g in made.given if g.tensor.name in taken)
    empty = Staged(node, pipeline, {s.name: parts[s.name] for s in stages}, streams, given, made.stored)
    return empty.with_stages(stages, empty.operators)


class NotLowered(PlanError):
    """``op``, of a subgraph that is to be a pipeline, has no lowering to axes."""

    def __init__(self, op: Operator, node: SfNode, reason: str) -> None:
        self.op, self.reason = op, reason
        super().__init__(
            f"{op.source or op.target} is in pipeline {node.name!r} and no lowering to axes: {reason}",
            "leave it out of the library of patterns, or write its lowering (studies/kitsune/lowering)",
        )


def joined(p: Staged, stage: str, into: str) -> Staged:
    """``stage`` as the epilogue of ``into``: its ops stand behind those."""
    first, last = p.pipeline.stage(into), p.pipeline.stage(stage)
    loops = {loop.axis: loop for loop in (*first.loops, *last.loops)}
    ops = (*first.ops, *last.ops)
    both = replace(first, ops=ops, loops=tuple(loops[a] for a in p.streams if a in loops))
    stages = [both if s is first else s for s in p.pipeline.stages if s is not last]
    operators = {name: ops for name, ops in p.operators.items() if name != stage}
    made = p.with_stages(stages, operators | {into: (*p.operators[into], *p.operators[stage])})
    return replace(made, pipeline=merge_common_ops(made.pipeline))


def queues(stages: Sequence[Stage]) -> Iterator[Queue]:
    """One a tile that another stage takes, whoever and however many those are."""
    taken = {s.name: set(s.taken()) for s in stages}
    for stage in stages:
        for tile in stage.defined():
            consumers = tuple(name for name, tiles in taken.items() if tile in tiles)
            if consumers:
                yield Queue(tile, stage.name, consumers)


def by_pass(ops: Sequence[TileOp], looped: Collection[str]) -> list[TileOp]:
    """Ops in the order of the passes that they belong to: before the loops, inside, behind, a second pass."""
    level: dict[str, int] = {}
    found: list[tuple[int, TileOp]] = []
    for op in ops:
        after = max((level.get(n, 0) for n in op.ins), default=0)
        inside = not op.mentions.isdisjoint(looped)
        at = after if after % 2 == inside else after + 1
        if op.out is not None:
            level[op.out.name] = at + 1 if not sums(op).isdisjoint(looped) else at
        found.append((at, op))
    return [op for _, op in sorted(found, key=lambda each: each[0])]


def _loops(ops: Sequence[TileOp], streams: Sequence[str]) -> tuple[Loop, ...]:
    found = set().union(*(op.mentions for op in ops))
    return tuple(Loop(a, TILE_ROWS if a == STREAM else 1) for a in streams if a in found)


def _live(stages: Sequence[Stage]) -> list[Stage]:
    """Without ops whose tiles nobody uses."""
    live = list(stages)
    while True:
        used = {n for s in live for op in s.ops for n in op.ins}
        kept = [replace(s, ops=tuple(op for op in s.ops if op.out is None or op.out.name in used)) for s in live]
        kept = [s for s in kept if s.ops]
        if kept == live:
            return live
        live = kept
