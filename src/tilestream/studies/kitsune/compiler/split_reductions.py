"""Split reductions into a partial and a final stage (Kitsune, Alg. 1: SplitReduction).

A sum over the rows of a batch (gradients of weights and biases) has few results and many addends. Every CTA of the
partial stage sums the tiles that it is dealt; the final stage adds the CTAs' sums, through a tree of queues. That makes
the reduced dimension a source of parallelism.
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from math import ceil

from tilestream.ir.axes import View, along
from tilestream.ir.pipeline import Stage, Tile, TileOp
from tilestream.studies.kitsune.compiler.operators import Kind, Operator
from tilestream.studies.kitsune.compiler.staged import Staged

SUM_ROWS, SUM_COLUMNS = 128, 128
"""Of a block of results in which a CTA of a partial stage sums over the rows that stream past."""
MOST_BLOCKS = 64


def splits(op: Operator) -> bool:
    """Whether ``op`` is a sum over rows that has fewer results than a stage has CTAs.

    A norm's derivative streams rows; the gradients of its two vectors are sums of few numbers beside that. A weight's
    gradient with more blocks than a stage has CTAs needs no second half: every block is one CTA's.
    """
    if op.over_rows and op.gemm is not None:
        batch, m, n, _ = op.gemm
        return batch * ceil(m / SUM_ROWS) * ceil(n / SUM_COLUMNS) < MOST_BLOCKS
    return op.over_rows and op.kind is Kind.REDUCTION


@lru_cache(maxsize=1024)
def split_reductions(p: Staged) -> Staged:
    """A stage behind each that ``splits``: it takes what all CTAs of that one have summed, and stores it."""
    stages: list[Stage] = []
    operators = dict(p.operators)
    for stage in p.pipeline.stages:
        stores = [op for op in stage.ops if op.kind == "store"]
        if not stores or not splits(p.operators[stage.name][0]):
            stages.append(stage)
            continue
        final = Stage(f"{stage.name}.final", tuple(op for s in stores for op in _finish(s, stage)), ())
        stages += [replace(stage, ops=tuple(op for op in stage.ops if op not in stores)), final]
        operators[final.name] = p.operators[stage.name]
    return p.with_stages(stages, operators)


def _finish(store: TileOp, stage: Stage) -> list[TileOp]:
    """The parts of all CTAs are one when the final stage takes them, and go to memory."""
    tile = stage.defined()[store.ins[0]]
    total = Tile(f"{tile.name}.total", tile.axes, tile.dtype)
    whole = TileOp("copy", total, (along(tile.name, [a.name for a in tile.axes]),), source=store.source)
    (read,) = store.views[:1]
    return [whole, replace(store, tiles=(View(total.name, read.at),))]
