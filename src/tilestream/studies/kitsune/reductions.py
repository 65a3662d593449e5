"""Split reductions into a partial and a final stage (Kitsune, Alg. 1: SplitReduction).

A sum over the rows of a batch (gradients of weights and biases) has few results and many addends. Every CTA of the
partial stage sums the tiles that it is dealt; the final stage adds the CTAs' sums, through a tree of queues. That makes
the reduced dimension a source of parallelism.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from tilestream.plan.spatial.operators import Kind, Operator, OperatorGraph
from tilestream.simulator.workload import Engine
from tilestream.studies.kitsune.pipeline import Half, Spatial, Stage

ROW_LIMIT = 8192
"""Elements of a row that one CTA can reduce by itself: 16 rows of them fill the largest payload, 256 KB."""
SUM_ROWS, SUM_COLUMNS = 128, 128
"""Of a block of results in which a CTA of a partial stage sums over the rows that stream past."""
MOST_BLOCKS = 64


def splits(op: Operator) -> bool:
    """Whether ``op`` reduces over more than a CTA holds: over rows, or over rows longer than ``ROW_LIMIT``.

    A norm's derivative streams rows; the gradients of its two vectors are sums of few numbers beside that. A weight's
    gradient with more blocks than a stage has CTAs needs no second half: every block is one CTA's.
    """
    if op.over_rows and op.gemm is not None:
        batch, m, n, _ = op.gemm
        return batch * ceil(m / SUM_ROWS) * ceil(n / SUM_COLUMNS) < MOST_BLOCKS
    if op.over_rows and op.kind is Kind.REDUCTION:
        return True
    return op.kind in (Kind.REDUCTION, Kind.SOFTMAX, Kind.NORM) and op.reduced > ROW_LIMIT


def split_reductions(p: Spatial, graph: OperatorGraph) -> Spatial:
    """Replace every stage that ``splits`` by its two halves; the final one runs on the SIMT pipes."""
    stages: list[Stage] = []
    for stage in p.stages:
        if stage.half is Half.WHOLE and splits(graph[stage.ops[0]]):
            stages.append(replace(stage, half=Half.PARTIAL))
            stages.append(Stage(f"{stage.name}.final", stage.ops, Engine.SIMT, Half.FINAL))
        else:
            stages.append(stage)
    return replace(p, stages=tuple(stages))
