"""A pipeline as text: what golden tests and ``explain`` print."""

from __future__ import annotations

from tilestream.ir.pipeline import Pipeline, Queue, Stage, Tensor, TileOp, Transport


def show(pipeline: Pipeline) -> str:
    """Every tensor, stage, op and queue on its own line; equal text means equal pipelines, source lines aside."""
    lines = [f"pipeline {pipeline.name} ({pipeline.strategy})"]
    lines += [f"  {_tensor(t)}" for t in pipeline.tensors]
    for stage in pipeline.stages:
        lines.append(f"  {_stage(stage)}")
        lines += [f"    {_op(op)}" for op in stage.ops]
        lines += [f"    {_queue(q, pipeline)}" for q in pipeline.queues if q.producer == stage.name]
    return "\n".join(lines) + "\n"


def _tensor(t: Tensor) -> str:
    shape = t.shape if t.role.value == "parameter" else ("rows", *t.shape)
    return f"{t.role.value} {t.name} [{', '.join(map(str, shape))}] {t.dtype}"


def _stage(s: Stage) -> str:
    rare = ", in pairs" * (s.group == 2) + ", one product in flight" * (s.in_flight == 1)
    return f"stage {s.name}: {s.replicas} replicas, Shard({s.placement.dim}), {s.residency.value}{rare}"


def _op(op: TileOp) -> str:
    operands = ", ".join([*op.ins, *op.params, *(f"{k}={v!r}" for k, v in op.attrs)])
    if op.out is None:
        return f"{op.kind}({operands})"
    return f"{op.out.name}: {op.out.features} {op.out.dtype} = {op.kind}({operands})"


def _queue(q: Queue, p: Pipeline) -> str:
    depth = "" if q.transport is Transport.DRAM else f", {q.depth} tiles of {p.tiles()[q.tile].bytes} bytes"
    return f"-> {q.tile} to {', '.join(q.consumers)} ({q.transport.value}{depth})"
