"""Cut a pipeline at its DRAM queues into the launches that run one after another."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from tilestream.errors import IRError
from tilestream.ir.once import once
from tilestream.ir.pipeline import Pipeline, Role, Tensor, TileOp, Transport
from tilestream.ir.ways import reached


def cut_at_dram(p: Pipeline) -> tuple[Pipeline, ...]:
    """Group stages joined by on-chip queues; a DRAM queue's tile becomes a tensor between groups.

    Raises:
        IRError: if the DRAM queues order the groups in a cycle.
    """
    return _cut(p) if any(q.transport is Transport.DRAM for q in p.queues) else (p,)


@once
def _cut(p: Pipeline) -> tuple[Pipeline, ...]:
    return tuple(launches_at_dram(p))


def launches_at_dram(p: Pipeline, of: str = "") -> Iterator[Pipeline]:
    """The launches of ``cut_at_dram``; of them the one with stage ``of`` alone, if a name is given."""
    dram = [q for q in p.queues if q.transport is Transport.DRAM]
    if not dram:
        yield p
        return
    order = _order(p, _groups(p))
    tiles = p.tiles()
    spilled = {
        q.tile: Tensor.of(f"{q.tile}.dram", Role.OUTPUT, (tiles[q.tile].features,), tiles[q.tile].dtype) for q in dram
    }
    for index, members in enumerate(order):
        if of and of not in members:
            continue
        stages = []
        tensors: dict[str, Tensor] = {}
        for stage in (s for s in p.stages if s.name in members):
            ops = list(stage.ops)
            for q in dram:
                buffer = spilled[q.tile]
                if stage.name in q.consumers:
                    tensors[buffer.name] = replace(buffer, role=Role.INPUT)
                    # A name of its own: several stages of one launch may load the same tile.
                    here = replace(tiles[q.tile], name=f"{q.tile}@{stage.name}")
                    ops = [op.reading({q.tile: here.name}) for op in ops]
                    ops.insert(0, TileOp("load", here, (), (buffer.name,), (), q.source))
                if stage.name == q.producer:
                    tensors[buffer.name] = buffer
                    ops.append(TileOp("store", None, (q.tile,), (buffer.name,), (), q.source))
            stages.append(replace(stage, ops=tuple(ops)))
            tensors |= {n: p.tensor(n) for op in stage.ops for n in op.params}
        queues = tuple(q for q in p.queues if q.transport is not Transport.DRAM and q.producer in members)
        yield Pipeline(f"{p.name}.{index}", tuple(tensors.values()), tuple(stages), queues, p.strategy)


def _groups(p: Pipeline) -> list[frozenset[str]]:
    """Stages that on-chip queues join, in either direction."""
    near = {s.name: {s.name} for s in p.stages}
    for q in p.queues:
        if q.transport is not Transport.DRAM:
            for consumer in q.consumers:
                near[q.producer].add(consumer)
                near[consumer].add(q.producer)
    return list(dict.fromkeys(frozenset(reached([s.name], near.__getitem__)) for s in p.stages))


def _order(p: Pipeline, groups: list[frozenset[str]]) -> list[frozenset[str]]:
    """``groups`` so that each comes after those that make what it reads; else in their order."""
    far = [q for q in p.queues if q.transport is Transport.DRAM]
    waits = {g: {q.producer for q in far if not g.isdisjoint(q.consumers)} for g in groups}
    done: list[frozenset[str]] = []
    while len(done) < len(groups):
        finished = frozenset().union(*done)
        ready = next((g for g in groups if g not in done and waits[g] <= finished), None)
        if ready is None:
            raise IRError(f"the DRAM queues of pipeline {p.name!r} form a cycle", "remove one of them")
        done.append(ready)
    return done
