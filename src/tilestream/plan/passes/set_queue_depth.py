"""How many tiles each L2 queue holds."""

from __future__ import annotations

from dataclasses import replace

from tilestream.ir.pipeline import Pipeline, Transport
from tilestream.ir.ways import longest


def set_queue_depth(p: Pipeline, steps: int = 2, depth: int | None = None) -> Pipeline:
    """Room for ``steps`` steps of all replicas at the busier end; more for a queue that skips stages.

    While a tile goes the long way round, its skip queue must hold all that follows it: the steps of every stage on
    the way. ``depth`` sets the tiles of every queue instead. DRAM queues hold every tile and have depth 0.
    """
    queues = []
    for q in p.queues:
        if q.transport is Transport.DRAM:
            queues.append(replace(q, depth=0))
        elif depth is not None:
            queues.append(replace(q, depth=depth))
        else:
            width = max(p.stage(n).tiles_per_step * p.stage(n).replicas for n in (q.producer, *q.consumers))
            tiles = steps * width * max(longest(p, q.producer, c) for c in q.consumers)
            queues.append(replace(q, depth=tiles + tiles % 2))
    return p.with_stages(p.stages, tuple(queues))
