"""Bytes that a pipeline of any axes moves at each level of memory, by formulas; its ops are in plain form."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import ceil, prod

from tilestream.ir.axes import Level, Spread, View, along, around
from tilestream.ir.derive import WRITES, Partial, Replicate, divided, element_bytes, exchange, placement, wanted
from tilestream.ir.lengths import Sizes, sizes_of
from tilestream.ir.pipeline import ELEMENT_BYTES, Pipeline, Queue, Role, Stage, TileOp


def mesh_traffic(p: Pipeline, size: Mapping[str, int]) -> dict[str, int]:
    """Bytes by level: ``shared`` and ``dsm`` of collectives inside a CTA and a cluster, ``l2``, and ``dram``.

    ``dram`` is compulsory: each tensor once, and DRAM queues; of a table that is read by an index, the rows that are
    taken where it has more of them, as ``ir.traffic`` counts row streams. ``l2``: what CTAs load (a cluster loads once
    what all of it wants), store, send through queues and exchange over the grid. What is not resident is loaded again
    for each step of a loop that the op has and the tensor lacks.

    Args:
        size: of every axis, those that are read at the call too; lengths of ragged ones are equal unless it has them.
    """
    size = sizes_of(p, size)
    moved: Counter[str] = Counter()
    views = [v for stage in p.stages for op in stage.ops for v in op.views[len(op.tiles) :]]
    for t in p.tensors:
        whole, own = size.positions(a.name for a in t.axes), [v for v in views if v.of == t.name]
        if t.role is not Role.OUTPUT and own and all(any(indices(v)) for v in own):
            whole = min(whole, max(size.positions(v.axes) for v in own))
        moved["dram"] += whole * ELEMENT_BYTES[t.dtype]
    for stage in p.stages:
        moved += stage_traffic(p, stage, size)
    for q in p.queues:
        moved[q.transport.value] += _through(p, q, size)
    return dict(moved)


def stage_traffic(p: Pipeline, stage: Stage, size: Sizes) -> Counter[str]:
    """Bytes of one stage's loads and stores (``l2``) and of its collectives, by level; queues are not among them."""
    moved: Counter[str] = Counter()
    s = _Counts(stage, size)
    for _, _, each in accesses(p, stage, size):
        moved["l2"] += each
    for op in stage.ops:
        moved += s.exchanged(op)
    return moved


def accesses(p: Pipeline, stage: Stage, size: Sizes) -> Iterator[tuple[TileOp, View, int]]:
    """Bytes of each load and store of a stage; an index by which it reads or writes is a load of its own."""
    s = _Counts(stage, size)
    for op in stage.ops:
        for view in op.views[len(op.tiles) :]:
            each = ELEMENT_BYTES[p.tensor(view.of).dtype]
            yield op, view, each * (s.stored(op, view) if op.kind in WRITES else s.loaded(op, view))
            for index in indices(view):
                each = ELEMENT_BYTES[p.tensor(index.of).dtype]
                yield op, index, each * s.index(op, view, index)


def indices(view: View) -> Iterator[View]:
    """What is read to know where a view reads or writes."""
    for at in view.at or ():
        if at.index:
            yield View(at.index, (replace(at, index=""),))


def through(p: Pipeline, q: Queue, size: Sizes) -> int:
    """Bytes that a queue's producers write to it: each its part, those of a sum all of it."""
    tile, producer = p.tiles()[q.tile], p.stage(q.producer)
    maker = producer.makers[q.tile]
    have = [placement(maker, d, producer) for d in producer.mesh]
    partial = [d.size for d, h in zip(producer.mesh, have, strict=True) if isinstance(h, Partial)]
    return size.positions(a.name for a in tile.axes) * element_bytes(tile, have) * prod(partial)


class _Counts:
    """Elements that the workers of one stage move."""

    def __init__(self, stage: Stage, size: Sizes) -> None:
        self.stage, self.size = stage, size

    def loaded(self, op: TileOp, view: View, resident: bool = False) -> int:
        """By all CTAs, or clusters where one load is multicast; parts again for positions that the tensor lacks."""
        resident |= view.of in self.stage.resident
        lacking = around(op.mentions, self.size.outer) - around(view.axes, self.size.outer)
        if not resident:  # a ragged axis's steps are counted over all that is around it
            lacking -= {self.size.outer[a] for a in lacking if a in self.size.outer}
        again = prod(self._groups(op, a, view, resident) for a in lacking)
        return round(self.size.positions(view.axes) * again * self._alike(op))

    def _groups(self, op: TileOp, axis: str, view: View, resident: bool) -> float:
        """Steps of all CTAs along ``axis``: each takes one block for each of its own workers. Of a ragged axis, those
        of each position around it; or of each block of these, where ``view`` lacks it too."""
        over = [d for d in self.stage.mesh if divided(op, d, self.stage) == axis]
        ctas = prod(d.size for d in over if d.level is Level.GRID)
        inside = prod(d.size for d in over if d.level is not Level.GRID)
        if axis in self.size.outer:
            return 1 if resident else self._ragged_steps(axis, view, inside)
        steps = ceil(self.size[axis] / (self.stage.block(axis, self.size) * inside))
        return min(steps, ctas) if resident or axis not in self.stage.blocks else steps

    def _ragged_steps(self, axis: str, view: View, inside: int) -> float:
        outer = self.size.outer[axis]
        tile = self.stage.blocks.get(axis, max(1, self.size.lengths[axis].largest)) * inside
        if outer in view.axes:
            return self.size.lengths[axis].steps(tile) / max(1, self.size[outer])
        each = self.stage.block(outer, self.size)
        return self.size.lengths[axis].steps_together(tile, each)

    def _alike(self, op: TileOp) -> int:
        """CTAs that all do the same."""
        return prod(d.size for d in self.stage.mesh if d.level is Level.GRID and not divided(op, d, self.stage))

    def index(self, op: TileOp, view: View, index: View) -> int:
        """By all who read or write ``view`` by it."""
        found = self.loaded(op, index, view.of in self.stage.resident)
        if op.kind not in WRITES:
            return found
        return found // self._alike(op) * (self.stored(op, view) // max(1, self.size.positions(view.axes)))

    def stored(self, op: TileOp, view: View) -> int:
        """By the first of those that have the same, by each of those that have a part of a sum."""
        maker = self.stage.makers.get(op.ins[0])
        parts = [d.size for d in self.stage.mesh if maker is not None and self._adds(op, maker, d)]
        return self.size.positions(view.axes) * prod(parts)

    def _adds(self, op: TileOp, maker: TileOp, d: Spread) -> bool:
        partial = isinstance(placement(maker, d, self.stage), Partial)
        return op.kind == "store_add" and partial and not divided(op, d, self.stage)

    def exchanged(self, op: TileOp) -> Counter[str]:
        """Bytes by level, of the collectives of one op; several at once are taken one after another."""
        moved: Counter[str] = Counter()
        for view in op.views[: len(op.tiles)]:
            maker = self.stage.makers.get(view.of)
            if maker is None:
                continue
            whole = self.size.positions(a.name for a in maker.made.axes)
            rounds = prod(self._rounds(a, view) for a in op.mentions - set(view.axes) if a in self.stage.blocks)
            for d in self.stage.mesh:
                how = exchange(op, view, maker, d, self.stage)
                if not how:
                    continue
                others = [x for x in self.stage.mesh if x is not d]
                if op.out is None:  # of those that have the same, the first stores; each adds its part of a sum
                    alike = prod(x.size for x in others if self._adds(op, maker, x))
                else:
                    wants = ((x.size, wanted(op, view, maker.made, x, self.stage)) for x in others)
                    alike = prod(n for n, want in wants if isinstance(want, Replicate))
                each = element_bytes(maker.made, [placement(maker, d, self.stage)])
                peers = {"all-reduce": d.size * (d.size - 1), "all-to-all": (d.size - 1) / d.size}
                moved[d.level.memory] += round(whole * each * peers.get(how, d.size - 1) * alike * rounds)
        return moved

    def _rounds(self, axis: str, view: View) -> float:
        """Rounds in which all workers together go along an axis that an operand lacks."""
        if axis in self.size.outer:
            return self._ragged_steps(axis, view, self.stage.parts(axis))
        return self.stage.rounds(axis, self.size)


def _through(p: Pipeline, q: Queue, size: Sizes) -> int:
    """Bytes written to and read from a queue."""
    tile, whole = p.tiles()[q.tile], through(p, q, size)
    take = TileOp("copy", tile, (along(tile.name, [a.name for a in tile.axes]),))
    readers = sum(_Counts(p.stage(c), size)._alike(take) for c in q.consumers)
    return whole * (1 + readers)
