"""A pipeline as text: what golden tests and ``explain`` print. ``ir.read`` reads the ops of the general form back."""

from __future__ import annotations

from tilestream.ir.axes import At, View
from tilestream.ir.columns import column_axis
from tilestream.ir.pipeline import Pipeline, Queue, Stage, Tensor, TileOp, Transport


def show(pipeline: Pipeline) -> str:
    """Every tensor, stage, op and queue on its own line; equal text means equal pipelines, source lines aside."""
    lines = [f"pipeline {pipeline.name} ({pipeline.strategy})"]
    lines += [f"  {_tensor(t)}" for t in pipeline.tensors]
    lines += [f"  axis {a.name}={a.bounds}[{a.of}]" for a in pipeline.ragged.values()]
    for stage in pipeline.stages:
        lines.append(f"  {_stage(stage)}")
        lines += [f"    {show_op(op)}" for op in stage.ops]
        lines += [f"    {_queue(q, pipeline)}" for q in pipeline.queues if q.producer == stage.name]
    return "\n".join(lines) + "\n"


def show_op(op: TileOp) -> str:
    """One op: as a call of what it does to rows, or as a formula where its operands have coordinates."""
    return _formula(op) if all(v.at is not None for v in op.views) else _call(op)


def _tensor(t: Tensor) -> str:
    axes = ", ".join(a.name or str(a.size) for a in t.axes)
    return f"{t.role.value} {t.name} [{axes}] {t.dtype}{' by columns' * t.by_columns}"


def _stage(s: Stage) -> str:
    if _by_rows(s):
        rare = ", in pairs" * (s.group == 2) + ", one product in flight" * (s.in_flight == 1)
        rare += "".join(f", {loop.axis} by {loop.tile}{' held' * loop.held}" for loop in s.loops[1:])
        return f"stage {s.name}: {s.replicas} replicas, Shard({s.placement.dim}), {s.residency.value}{rare}"
    loops = ", ".join(f"{loop.axis}/{loop.tile}" for loop in s.loops) or "none"
    mesh = ", ".join(f"{d.level.value} {d.size} ({', '.join(d.axes) or 'columns'})" for d in s.mesh) or "one worker"
    kept = f"; resident {', '.join(s.resident)}" if s.resident else ""
    return f"stage {s.name}: loops {loops}; {mesh}{kept}"


def _by_rows(s: Stage) -> bool:
    """Whether the words of row stages say all there is of the mesh."""
    columns = {column_axis(name) for name in s.defined()}
    return bool(s.loops) and {loop.axis for loop in s.loops[1:]} <= columns and s.mesh == s.with_().mesh


def _call(op: TileOp) -> str:
    operands = ", ".join([*op.ins, *op.params, *(f"{k}={v!r}" for k, v in op.attrs)])
    if op.out is None:
        return f"{op.kind}({operands}{f', combine={op.combine}' * bool(op.receivers)})"
    return f"{op.out.name}: {op.out.features} {op.out.dtype} = {op.kind}({operands})"


def _formula(op: TileOp) -> str:
    views = [_view(v) for v in op.views]
    if op.out is None:
        return f"{views[0]} {'+' if op.kind == 'store_add' else '-'}> {views[-1]}"
    attrs = [f"{k}={v!r}" for k, v in op.attrs]
    combine = [f"combine={op.combine}"] * (op.combine != ("max" if op.kind == "max" else "sum"))
    axes = ",".join(a.name for a in op.out.axes)
    return f"{op.out.name}[{axes}]:{op.out.dtype} = {' '.join([op.kind, *views, *attrs, *combine])}"


def _view(v: View) -> str:
    return f"{v.of}[{','.join(_at(c) for c in v.at or ())}]"


def _at(c: At) -> str:
    terms = [
        f"{stride}*{a}" if stride != 1 else a
        for a, stride in zip(map(c.part, c.axes), c.strides or [1] * len(c.axes), strict=True)
    ]
    text = "+".join(terms)
    if c.offset or not terms:
        text += f"{c.offset:+d}" if terms else str(c.offset)
    return f"{c.index}[{text}]" if c.index else text


def _queue(q: Queue, p: Pipeline) -> str:
    size = next((loop.tile for loop in p.stage(q.producer).loops), 1) * p.tiles()[q.tile].row_bytes
    depth = "" if q.transport is Transport.DRAM else f", {q.depth} tiles of {size} bytes"
    return f"-> {q.tile} to {', '.join(q.consumers)} ({q.transport.value}{depth})"
