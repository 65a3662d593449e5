"""Fuse neighbours that need no queue: an elementwise operator behind the stage that makes its operand (Kitsune 3.2).

What the paper calls trivially fusable: the operand has one reader, so the operator runs on the accumulators of the
stage before it and its operand never leaves the registers.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tilestream.plan.spatial.operators import Kind, Operator, OperatorGraph
from tilestream.simulator.workload import Engine
from tilestream.studies.kitsune.pipeline import Half, Spatial, Stage, engine_of
from tilestream.studies.kitsune.reductions import splits

ROW_BY_ROW = (Kind.ELEMENTWISE, Kind.REDUCTION, Kind.NORM, Kind.SOFTMAX)


def fuse_epilogues(p: Spatial, graph: OperatorGraph) -> Spatial:
    """Join each stage to the one before it, where ``fusable`` says so; the graph's order is kept."""
    stages: list[Stage] = list(p.stages)
    for stage in p.stages:
        if len(stage.ops) != 1 or stage.half is not Half.WHOLE:
            continue
        op = graph[stage.ops[0]]
        before = fusable(op, stages, graph)
        if before is None or before.name == stage.name:
            continue
        ops = (*before.ops, op.name)
        joined = replace(before, ops=ops, engine=engine_of([graph[n] for n in ops]))
        stages = [joined if s is before else s for s in stages if s.name != stage.name]
    for stage in p.stages:
        if stage.half is Half.PARTIAL and graph[stage.ops[0]].kind is Kind.REDUCTION:
            stages = _ride(stage, stages, graph)
    return replace(p, stages=tuple(stages))


def _ride(stage: Stage, stages: list[Stage], graph: OperatorGraph) -> list[Stage]:
    """Let the stage that makes the operand of a sum over rows add it up as well, in registers; the final half stays."""
    made = {name: s for s in stages if s.half is Half.WHOLE for name in s.ops}
    producer = graph.producer(graph[stage.ops[0]].inputs[0].value)
    if producer is None or producer.name not in made:
        return stages
    before = made[producer.name]
    joined = replace(before, ops=(*before.ops, *stage.ops))
    return [joined if s is before else s for s in stages if s is not stage]


def fusable(op: Operator, stages: list[Stage], graph: OperatorGraph) -> Stage | None:
    """The stage that ``op`` can be the epilogue of: it makes an operand that only ``op`` reads in this pipeline.

    Behind a product that is an elementwise operator on all of its result; behind operators on SIMT pipes whatever
    goes row by row, so that a norm written as five operators is one stage. What is needed outside as well is written
    to memory besides. No other operand may come from a stage that waits for this one, or the two would wait for each
    other.
    """
    if op.kind not in ROW_BY_ROW or splits(op):
        return None
    shape = graph.values[op.outputs[0]].shape
    place = {name: i for i, s in enumerate(stages) for name in s.ops}
    for operand in op.inputs:
        producer = graph.producer(operand.value)
        if producer is None or producer.name not in place:
            continue
        stage = stages[place[producer.name]]
        if stage.engine is Engine.SIMT:
            fits = graph[stage.ops[0]].kind in ROW_BY_ROW and producer.rows == op.rows
        else:
            fits = op.kind is Kind.ELEMENTWISE and prod(operand.shape) == prod(shape) and stage.ops[-1] == producer.name
        alone = sum(r.name in place for r in graph.consumers(operand.value)) == 1
        if fits and alone and stage.half is Half.WHOLE and not _returns(op, stage, stages, graph):
            return stage
    return None


def _returns(op: Operator, stage: Stage, stages: list[Stage], graph: OperatorGraph) -> bool:
    """Whether an operand of ``op`` depends on ``stage`` by a way that leaves it."""
    unit = {name: s.name for s in stages for name in s.ops}
    todo = [p for p in graph.predecessors(op) if p.name in unit and unit[p.name] != stage.name and p.name != op.name]
    seen: set[str] = set()
    while todo:
        at = todo.pop()
        for p in graph.predecessors(at):
            if unit.get(p.name) == stage.name:
                return True
            if p.name in unit and p.name not in seen:
                seen.add(p.name)
                todo.append(p)
        # An earlier epilogue may have tied other operators to this one's stage.
        for name in next(s.ops for s in stages if s.name == unit[at.name]):
            if name not in seen:
                seen.add(name)
                todo.append(graph[name])
    return False
