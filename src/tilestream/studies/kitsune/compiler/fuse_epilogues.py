"""Fuse neighbours that need no queue: an elementwise operator behind the stage that makes its operand (Kitsune 3.2).

What the paper calls trivially fusable: the operand has one reader, so the operator runs on the accumulators of the
stage before it and its operand never leaves the registers.
"""

from __future__ import annotations

from functools import lru_cache
from math import prod

from tilestream.ir.ways import between
from tilestream.simulator.workload import Engine
from tilestream.studies.kitsune.compiler.operators import Kind, OperatorGraph
from tilestream.studies.kitsune.compiler.split_reductions import splits
from tilestream.studies.kitsune.compiler.staged import Staged, joined

ROW_BY_ROW = (Kind.ELEMENTWISE, Kind.REDUCTION, Kind.NORM, Kind.SOFTMAX)


@lru_cache(maxsize=1024)
def fuse_epilogues(p: Staged, graph: OperatorGraph) -> Staged:
    """Join each stage to the one before it, where ``fusable`` says so; then sums of gradients ride."""
    for name in p.names:
        if not (p.is_partial(name) or p.is_final(name)) and (before := fusable(p, name, graph)):
            p = joined(p, name, before)
    for name in p.names:
        if p.is_partial(name) and p.operators[name][0].kind is Kind.REDUCTION:
            p = _ride(p, name, graph)
    return p


def _ride(p: Staged, stage: str, graph: OperatorGraph) -> Staged:
    """Let the stage that makes the operand of a sum over rows add it up as well, in registers; the final half stays."""
    producer = graph.producer(p.operators[stage][0].inputs[0].value)
    if producer is None or producer.name not in p.node.ops or p.is_partial(before := p.holder(producer.name)):
        return p
    return joined(p, stage, before)


def fusable(p: Staged, name: str, graph: OperatorGraph) -> str:
    """The stage that stage ``name``, an operator, can be the epilogue of: it makes an operand that nobody else reads.

    Behind a product that is an elementwise operator on all of its result; behind operators on SIMT pipes whatever
    goes row by row, so that a norm written as five operators is one stage. What is needed outside as well is written
    to memory besides. No other operand may come from a stage that waits for this one, or the two would wait for each
    other. Empty if there is none.
    """
    (op,) = p.operators[name]
    if op.kind not in ROW_BY_ROW or splits(op):
        return ""
    shape = graph.values[op.outputs[0]].shape
    for operand in op.inputs:
        producer = graph.producer(operand.value)
        if producer is None or producer.name not in p.node.ops:
            continue
        before = p.holder(producer.name)
        if p.engine(before) is Engine.SIMT:
            fits = p.operators[before][0].kind in ROW_BY_ROW and producer.rows == op.rows
        else:
            last = p.operators[before][-1] is producer
            fits = op.kind is Kind.ELEMENTWISE and prod(operand.shape) == prod(shape) and last
        alone = sum(r.name in p.node.ops for r in graph.consumers(operand.value)) == 1
        if fits and alone and not p.is_partial(before) and not between(p.pipeline, before, name):
            return before
    return ""
