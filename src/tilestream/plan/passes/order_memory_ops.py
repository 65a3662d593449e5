"""Loads late, stores early: nothing is held longer than it must be."""

from __future__ import annotations

from dataclasses import replace

from tilestream.ir.pipeline import Pipeline, Stage, TileOp


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
