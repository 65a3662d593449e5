"""Common-subexpression removal."""

from __future__ import annotations

from dataclasses import replace

from tilestream.ir.pipeline import Pipeline, Stage, TileOp


def merge_common_ops(p: Pipeline) -> Pipeline:
    """Compute equal ops of a stage once. Equal: kind, operands, attributes and the result's dtype."""
    queued = {q.tile for q in p.queues}
    stages: list[Stage] = []
    for stage in p.stages:
        seen: dict[tuple, str] = {}
        same: dict[str, str] = {}
        ops: list[TileOp] = []
        for op in stage.ops:
            op = op.reading(same)
            if op.out is None or op.out.name in queued:
                ops.append(op)
                continue
            key = (op.kind, op.views, op.combine, tuple(sorted(op.attrs, key=str)), op.out.axes, op.out.dtype)
            if key in seen:
                same[op.out.name] = seen[key]
            else:
                seen[key] = op.out.name
                ops.append(op)
        stages.append(replace(stage, ops=tuple(ops)) if same else stage)
    return p.with_stages(tuple(stages))
