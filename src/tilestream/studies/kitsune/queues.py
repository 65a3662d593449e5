"""Ring queues for every value that passes from stage to stage (Kitsune, Alg. 1: CreateQueue)."""

from __future__ import annotations

from dataclasses import replace
from math import prod

from tilestream.plan.spatial.operators import OperatorGraph
from tilestream.studies.kitsune.pipeline import Half, Ring, Spatial

ACCUMULATOR_BYTES = 4
"""Partial sums are fp32."""


def create_queues(p: Spatial, graph: OperatorGraph) -> Spatial:
    """One queue a value that another stage reads, whoever and however many those are; and one behind each partial sum.

    One queue with several consumers is a multicast. What is needed outside is written to memory besides.
    """
    rings: list[Ring] = []
    finals = p.finals()
    for stage in p.stages:
        if stage.half is Half.FINAL:
            continue
        for name in stage.ops:
            if name in finals:
                size = sum(prod(graph.values[v].shape) for v in graph[name].outputs) * ACCUMULATOR_BYTES
                rings.append(Ring(stage.name, (finals[name].name,), "", float(size)))
                continue
            for value, size in zip(graph[name].outputs, graph[name].output_bytes, strict=True):
                readers = {r.name for r in graph.consumers(value)}
                # The final half of a reduction reads partial sums, not operands.
                consumers = tuple(
                    s.name
                    for s in p.stages
                    if s.name != stage.name and s.half is not Half.FINAL and readers & set(s.ops)
                )
                if consumers and size > 0:
                    rings.append(Ring(stage.name, consumers, value, size))
    return replace(p, rings=tuple(rings))
