"""Drop ops whose result nobody stores."""

from __future__ import annotations

from dataclasses import replace

from tilestream.ir.pipeline import Pipeline, Stage


def remove_dead_ops(p: Pipeline) -> Pipeline:
    """The same pipeline without ops that no store depends on. Tensors stay: they are the pipeline's signature."""
    queued = {q.tile for q in p.queues}
    stages: list[Stage] = []
    for stage in p.stages:
        live: set[str] = set(queued)
        kept = []
        for op in reversed(stage.ops):
            if op.out is None or op.out.name in live:
                live.update(op.ins)
                kept.append(op)
        stages.append(stage if len(kept) == len(stage.ops) else replace(stage, ops=tuple(reversed(kept))))
    return p.with_stages(tuple(stages))
