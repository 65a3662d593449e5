"""How many tiles each L2 queue holds."""

from __future__ import annotations

from dataclasses import replace

from tilestream.ir.pipeline import Pipeline, Queue, Transport


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
            tiles = steps * width * _hops(p, q)
            queues.append(replace(q, depth=tiles + tiles % 2))
    return p.with_stages(p.stages, tuple(queues))


def _hops(p: Pipeline, q: Queue) -> int:
    """Stages on the longest way from the producer to a consumer, through on-chip queues."""
    after: dict[str, list[str]] = {s.name: [] for s in p.stages}
    for other in p.queues:
        if other.transport is not Transport.DRAM:
            after[other.producer] += other.consumers

    def longest(name: str, goal: str) -> int:
        """Hops from ``name`` to ``goal``, or a negative number if there is no way."""
        if name == goal:
            return 0
        return max((1 + longest(n, goal) for n in after[name]), default=-len(p.stages) - 1)

    return max(longest(q.producer, c) for c in q.consumers)
