"""What every program goes through: dead ops dropped, equal ops merged, loads late and stores early."""

from __future__ import annotations

from dataclasses import replace

from tilestream.ir.pipeline import Pipeline, Stage, TileOp


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


def order_memory_ops(p: Pipeline) -> Pipeline:
    """Put each load in front of its first use and each store behind the op that makes its tile."""
    return p.with_stages(tuple(replace(s, ops=_ordered(s)) for s in p.stages))


def _ordered(stage: Stage) -> tuple[TileOp, ...]:
    loads = {op.out.name: op for op in stage.ops if op.kind == "load" and op.out is not None}
    stores: dict[str, list[TileOp]] = {}
    for op in stage.ops:
        if op.kind == "store":
            stores.setdefault(op.ins[0], []).append(op)
    out: list[TileOp] = []
    taken = set(stage.taken())
    for name in taken & set(stores):
        out += stores.pop(name)

    def place(op: TileOp) -> None:
        out.append(op)
        if op.out is not None:
            out.extend(stores.pop(op.out.name, ()))

    def need(op: TileOp) -> None:
        for name in op.ins:
            if name in loads:
                place(loads.pop(name))

    for op in stage.ops:
        if op.kind not in ("load", "store"):
            need(op)
            place(op)
    for op in list(loads.values()):  # loads that are only stored, or only handed on
        place(op)
    return tuple(out)
