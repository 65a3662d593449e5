"""Pipelines of any axes and meshes, tile by tile: every worker has a private memory, queues are bounded.

A worker that reads what it neither made nor was handed is an error. What moves between workers is derived from
placements alone; one method, ``_assembled``, is all collectives.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import ceil, prod

import torch
from torch import Tensor as Array

from tilestream.ir.axes import Level, View, along, around
from tilestream.ir.derive import (
    Nest,
    Partial,
    Replicate,
    Shard,
    divided,
    element_bytes,
    exchange,
    loops_of,
    placement,
    sums,
    wanted,
)
from tilestream.ir.mesh_traffic import indices
from tilestream.ir.pipeline import DTYPE_BYTES, ELEMENT_BYTES, Pipeline, Queue, Stage, Tile, TileOp, Transport
from tilestream.reference.einsum import COMBINE, Weighed, evaluate, softmax, together
from tilestream.reference.memory import Memory
from tilestream.reference.ops import Arithmetic
from tilestream.reference.ring import Ring, Wait, take_turns
from tilestream.reference.segments import Positions, Segments, check_indices, check_orders, none_at_all, pieces
from tilestream.reference.workers import Coordinates, Steps, Workers, coordinate, read


@dataclass
class Moved:
    """What a run moved: ``bytes`` by level (dsm, shared, l2, dram), and how often which collective at which."""

    bytes: Counter[str] = field(default_factory=Counter)
    collectives: Counter[str] = field(default_factory=Counter)


def run_meshes(
    p: Pipeline, tensors: Mapping[str, Array], arithmetic: Arithmetic, moved: Moved | None = None
) -> dict[str, Array]:
    """Every output of a pipeline in plain form (``ir.plain``).

    Args:
        tensors: every input and parameter; those that index are of an integer type.
        moved: filled with what moved.

    Raises:
        InputError: two tensors disagree on the size of an axis, or a size is not known.
        PipelineDeadlock: no stage can go on; says where each waits.
    """
    return _Machine(p, tensors, arithmetic, moved or Moved()).run()


@dataclass
class _Held:
    """What a worker has of a tile, and where it has something."""

    value: Array
    known: Array
    weight: Array
    """Of a softmax that is not complete: what it weighs beside other parts."""

    def combined(self, how: str, where: tuple, other: Weighed) -> Weighed:
        """What is here and another part of it, by ``how`` parts are combined."""
        if how == "softmax":
            return together((self.value[where], self.weight[where]), other)
        return COMBINE[how][1](self.value[where], other[0]), other[1]


class _Machine(Memory):
    def __init__(self, p: Pipeline, tensors: Mapping[str, Array], arithmetic: Arithmetic, moved: Moved) -> None:
        super().__init__(p, tensors, arithmetic)
        self.moved = moved
        check_orders(p, tensors)
        check_indices(p, tensors)
        self.rings = [_Ring(q, p.stage(q.producer), self.size) for q in p.queues]
        self.stages = {s.name: _Running(s, self.size, self.segments, self.rings) for s in p.stages}
        self.done: set[str] = set()

    def run(self) -> dict[str, Array]:
        workers = {f"stage {name!r}": self._work(s) for name, s in self.stages.items()}
        take_turns(self.p.name, workers, "make the queue named deeper, or let it be in DRAM")
        return self.outputs()

    def _work(self, s: _Running) -> Iterator[Wait | None]:
        yield from self._walk(s.program, {}, s)
        self.done.add(s.stage.name)

    def _walk(self, body: Sequence[TileOp | Nest], now: Steps, s: _Running) -> Iterator[Wait | None]:
        """The program of a stage: a step is what it pushes or takes."""
        for item in body:
            if isinstance(item, Nest):
                for step in range(s.workers.rounds(item.axis)):
                    yield from self._walk(item.body, {**now, item.axis: step}, s)
            elif item.kind in ("push", "take"):
                ring = self.rings[int(item.attr("ring") or 0)]
                keys = ring.keys(s.workers, now)
                if item.kind == "push":
                    while not ring.has_room(keys):
                        yield Wait(f"waits for room for {len(keys)} tiles", ring)
                    self._push(ring, keys, item, now, s)
                else:
                    while ring.queue.transport is Transport.DRAM and ring.queue.producer not in self.done:
                        yield Wait(f"waits for the end of stage {ring.queue.producer!r}", ring)
                    while missing := [k for k in keys if not ring.holds(k, s.stage.name)]:
                        yield Wait(f"waits for tile {missing[0]}", ring)
                    self._take(ring, keys, item, now, s)
                yield None
            else:
                self._apply(item, now, s)

    # -- queues

    def _push(self, ring: _Ring, keys: list[tuple[int, ...]], op: TileOp, now: Steps, s: _Running) -> None:
        tile = ring.tile
        partial = any(isinstance(have, Partial) for have in s.over(tile.name))
        for me in s.workers.all():
            if not s.first_of_equals(op, me):
                continue
            sent, own = ring.memories.setdefault(me, self._nothing(tile)), s.private[me][tile.name]
            for where in map(ring.region, keys):
                part = own.value[where]
                sent.value[where] = part if partial else self.arithmetic.rounded(part, tile.dtype)
                sent.known[where], sent.weight[where] = own.known[where], own.weight[where]
            mine = [s.part(a.name, s.makers[tile.name], me, now) for a in tile.axes]
            each = element_bytes(tile, s.over(tile.name))
            self.moved.bytes[ring.queue.transport.value] += prod(map(len, mine)) * each
        for key in keys:
            ring.pushed(key)

    def _take(self, ring: _Ring, keys: list[tuple[int, ...]], op: TileOp, now: Steps, s: _Running) -> None:
        producer, tile = self.stages[ring.queue.producer], ring.tile
        have = producer.over(tile.name)
        apart = [i for i, h in enumerate(have) if not isinstance(h, Replicate)]
        copies: set[tuple[object, ...]] = set()
        for me in s.workers.all():
            need = [s.part(a.name, op, me, now) for a in tile.axes]
            value, parts = self._assembled(tile, need, producer, (0,) * len(have), apart, ring.memories)
            old = s.private[me].setdefault(tile.name, self._nothing(tile))
            old.value = torch.where(value.known, value.value, old.value)
            old.known |= value.known
            copy = (s.cta(me), *(tuple(n.tolist()) for n in need))
            if copy not in copies:  # one copy is multicast to a whole cluster
                self.moved.bytes[ring.queue.transport.value] += sum(parts.values())
                copies.add(copy)
        taken = {wanted(op, along(tile.name, [a.name for a in tile.axes]), tile, d, s.stage) for d in s.stage.mesh}
        for h in have:
            if isinstance(h, Partial):
                self.moved.collectives[f"reduction tree {ring.queue.transport.value}"] += 1
            elif isinstance(h, Shard) and h not in taken and h.axis not in ring.keyed:
                self.moved.collectives[f"all-gather {ring.queue.transport.value}"] += 1
        ring.took(keys, s.stage.name)

    # -- ops

    def _apply(self, op: TileOp, now: Steps, s: _Running) -> None:
        """One op in all workers, in lock-step."""
        s.loading.clear()
        moves = {view: s.exchanged(op, view) for view in op.views[: len(op.tiles)] if view.of in s.makers}
        for me in s.workers.all():
            if op.out is None and not s.first_of_equals(op, me):
                continue
            if op.out is not None:
                s.private[me].setdefault(op.out.name, self._nothing(op.out))
            at = {a: s.part(a, op, me, now) for a in around(op.mentions, s.stage.outer)}
            for piece in pieces(op, at, self.segments):
                self._apply_to(op, piece, moves, me, now, s)
        for view in op.views[: len(op.tiles)]:
            for i, how in moves.get(view, {}).items():
                self.moved.collectives[f"{how} {s.stage.mesh[i].level.memory}"] += 1

    def _apply_to(
        self, op: TileOp, at: Positions, moves: Mapping[View, dict], me: Coordinates, now: Steps, s: _Running
    ) -> None:
        """One op in one worker, at these positions."""
        idle = not all(len(x) for x in at.values())  # past the end, it still owes its peers a sum of nothing
        if idle and (op.out is None or not all(len(at[a.name]) for a in op.out.axes)):
            return
        reads = op.views if op.out is not None else op.views[:-1]
        operands = [] if idle else [self._operand(op, v, moves.get(v, {}), at, me, s) for v in reads]
        if op.out is None:
            self.store(op, operands[0], at)
            stored = prod(len(at[a]) for a in op.views[-1].axes)
            self.moved.bytes["l2"] += stored * DTYPE_BYTES[self.p.tensor(op.params[-1]).dtype]
            for index in indices(op.views[-1]):
                self._count_load(index, at, me, s)
        else:
            self._make(op, operands, at, now, s.private[me])

    def _operand(
        self, op: TileOp, view: View, moves: Mapping[int, str], at: dict[str, Array], me: Coordinates, s: _Running
    ) -> Array:
        if view.of in self.memory:
            self._count_load(view, at, me, s, view.of in s.stage.resident)
            return read(self.memory[view.of], view, at, self.memory)
        maker, source = s.makers[view.of], s.private[me][view.of]
        if apart := list(moves):
            need = [coordinate(c, at, view.axes, self.memory).unique() for c in view.at or ()]
            need = [n[(n >= 0) & (n < size)] for n, size in zip(need, source.value.shape, strict=True)]
            source, parts = self._assembled(maker.made, need, s, me, apart, s.private_of(view.of))
            for peer, size in parts.items():
                levels = [s.stage.mesh[i].level for i in apart if peer[i] != me[i]]
                if levels:  # they meet at the outermost level that they are apart at
                    self.moved.bytes[next(level for level in Level if level in levels).memory] += size
        if not read(source.known, view, at, self.memory, outside=1).all():
            raise AssertionError(f"stage {s.stage.name!r} worker {me}: {op.kind} reads {view.of!r}, which it has not")
        value = read(source.value, view, at, self.memory)
        return self.arithmetic.rounded(value, maker.made.dtype) if op.kind == "product" else value

    def _assembled(
        self,
        tile: Tile,
        need: list[Array],
        s: _Running,
        me: Coordinates,
        apart: list[int],
        memories: Mapping[Coordinates, _Held],
    ) -> tuple[_Held, dict[Coordinates, int]]:
        """``tile`` at positions ``need`` from the workers that differ from ``me`` along directions ``apart``.

        Parts are put side by side, partial results combined in the order of the workers: every collective there is.
        Also the bytes that came from each.
        """
        have = s.over(tile.name)
        partial = [h for i in apart if isinstance(h := have[i], Partial)]
        how = partial[0].combine if partial else "sum"
        each = element_bytes(tile, partial)
        made = self._nothing(tile)
        made.value[_grid(need)] = COMBINE[how][0]
        parts: dict[Coordinates, int] = {}
        for peer in s.workers.all():
            if peer not in memories or any(peer[i] != c for i, c in enumerate(me) if i not in apart):
                continue
            owned = [
                s.workers.share(n, a.name, s.makers[tile.name], peer) for a, n in zip(tile.axes, need, strict=True)
            ]
            where = _grid(owned)
            sent = memories[peer]
            made.value[where], made.weight[where] = made.combined(how, where, (sent.value[where], sent.weight[where]))
            made.known[where] = sent.known[where]
            parts[peer] = prod(map(len, owned)) * each
        return made, parts

    def _count_load(
        self, view: View, at: dict[str, Array], me: Coordinates, s: _Running, resident: bool = False
    ) -> None:
        """Once for all workers of a cluster that read the same at once; once for good where it is resident."""
        for index in indices(view):
            self._count_load(index, at, me, s, resident)
        what = (s.cta(me), view, tuple(tuple(at[a].tolist()) for a in view.axes))
        if what in (s.loaded if resident else s.loading):
            return
        (s.loaded if resident else s.loading).add(what)
        dtype = self.p.tensor(view.of).dtype
        self.moved.bytes["l2"] += prod(len(at[a]) for a in view.axes) * ELEMENT_BYTES[dtype]

    def _make(self, op: TileOp, operands: list[Array], at: dict[str, Array], now: Steps, private: dict) -> None:
        """Evaluate, and combine with what earlier rounds of a loop gave."""
        lengths = {a: len(x) for a, x in at.items()}
        where = _grid([at[a.name] for a in op.made.axes])
        memory: _Held = private[op.made.name]
        weight = torch.full([lengths[a.name] for a in op.made.axes], -torch.inf, dtype=self.arithmetic.dtype)
        if not all(lengths.values()):
            value = torch.full_like(weight, self._of_nothing(op, at))
        elif op.combine == "softmax":
            value, weight = softmax(op, operands, lengths)
        else:
            value = evaluate(op, operands, lengths, self.arithmetic.dtype)
        if any(now.get(a) for a in sums(op)):  # a later round
            value, weight = memory.combined(op.combine, where, (value, weight))
        memory.value[where] = self.arithmetic.rounded(value, op.made.dtype) if op.kind == "cast" else value
        memory.weight[where], memory.known[where] = weight, True

    def _of_nothing(self, op: TileOp, at: Positions) -> float:
        """What a sum starts with; or what the op says it is where there is nothing, for any worker, in any round."""
        stands = op.attr("empty")
        if stands is None or not none_at_all(op, at, self.segments):
            return COMBINE[op.combine][0]
        return float(stands)

    def _nothing(self, tile: Tile) -> _Held:
        value = torch.zeros([self.size[a.name] for a in tile.axes], dtype=self.arithmetic.dtype)
        return _Held(value, torch.zeros_like(value, dtype=torch.bool), torch.full_like(value, -torch.inf))


class _Running:
    """A stage at work: its program with the ends of queues in it, its workers, their private memories."""

    def __init__(
        self, stage: Stage, size: Mapping[str, int], segments: Mapping[str, Segments], rings: Sequence[_Ring]
    ) -> None:
        self.stage, self.workers = stage, Workers(stage, size, segments)
        ops = list(stage.ops)
        for number, ring in enumerate(rings):
            name, which = ring.tile.name, (("ring", number),)
            if stage.name in ring.queue.consumers:
                # What no loop runs over is waited for before the loops begin.
                looped = any(loop.axis == a.name for loop in stage.loops for a in ring.tile.axes)
                first = next(i for i, op in enumerate(ops) if name in op.ins) if looped else 0
                ops.insert(first, TileOp("take", ring.tile, attrs=which))
            if stage.name == ring.queue.producer:
                at = next(i for i, op in enumerate(ops) if op.out is not None and op.out.name == name)
                whole = not sums(ops[at]).isdisjoint(loop.axis for loop in stage.loops)
                own = along(name, [a.name for a in ring.tile.axes])
                # What is summed over a loop is there when the loop is over.
                ops.insert(len(ops) if whole else at + 1, TileOp("push", None, (own,), attrs=which))
        self.program = loops_of(Stage(stage.name, tuple(ops), stage.loops, stage.mesh))
        self.makers = {op.out.name: op for op in ops if op.out is not None}
        self.loading: set[tuple[object, ...]] = set()
        self.loaded: set[tuple[object, ...]] = set()
        self.parts: dict[tuple[object, ...], Array] = {}
        self.private: dict[Coordinates, dict[str, _Held]] = {c: {} for c in self.workers.all()}

    def private_of(self, tile: str) -> dict[Coordinates, _Held]:
        return {c: memory[tile] for c, memory in self.private.items() if tile in memory}

    def part(self, axis: str, op: TileOp, me: Coordinates, now: Steps) -> Array:
        """Positions of this round that are a worker's: the same for every op that is divided alike."""
        axes = around((axis,), self.stage.outer)
        dividing = tuple(i for a in sorted(axes) for i in self.workers.dividing(a, op))
        key = (axis, tuple(now.get(a) for a in sorted(axes)), dividing, tuple(me[i] for i in dividing))
        if key not in self.parts:
            self.parts[key] = self.workers.share(self.workers.step(axis, now), axis, op, me)
        return self.parts[key]

    def exchanged(self, op: TileOp, view: View) -> dict[int, str]:
        """Directions over which something moves so that ``op`` can read a tile, and what."""
        maker, mesh = self.makers[view.of], self.stage.mesh
        return {i: how for i, d in enumerate(mesh) if (how := exchange(op, view, maker, d, self.stage))}

    def over(self, tile: str) -> list:
        return [placement(self.makers[tile], d, self.stage) for d in self.stage.mesh]

    def cta(self, me: Coordinates) -> Coordinates:
        return tuple(c for c, d in zip(me, self.stage.mesh, strict=True) if d.level is Level.GRID)

    def first_of_equals(self, op: TileOp, me: Coordinates) -> bool:
        """Of workers that would store or push the same, the first does; a partial result is each worker's own."""
        have = self.over(op.ins[0])
        for c, d, h in zip(me, self.stage.mesh, have, strict=True):
            own = isinstance(h, Partial) and op.kind in ("store_add", "push")
            if c and not divided(op, d, self.stage) and not own:
                return False
        return True


class _Ring(Ring):
    """A queue: at most ``depth`` tiles, each freed when its last consumer took it. Tiles are keyed by their blocks."""

    def __init__(self, queue: Queue, producer: Stage, size: Mapping[str, int]) -> None:
        super().__init__(queue)
        self.tile = producer.defined()[queue.tile]
        self.block = producer.blocks
        self.keyed = [a.name for a in self.tile.axes if a.name in self.block]
        self.size = size
        self.memories: dict[Coordinates, _Held] = {}

    def has_room(self, keys: list[tuple[int, ...]]) -> bool:
        return self.queue.transport is Transport.DRAM or len(self.unread) + len(keys) <= self.queue.depth

    def keys(self, w: Workers, now: Steps) -> list[tuple[int, ...]]:
        """The tiles of a step of these workers: all of them, of an axis that they do not loop over."""
        spans = []
        for a in self.keyed:
            last, many = ceil(self.size[a] / self.block[a]), w.stage.parts(a)
            spans.append(range(now[a] * many, min((now[a] + 1) * many, last)) if a in now else range(last))
        return list(product(*spans))

    def region(self, key: tuple[int, ...]) -> tuple[slice, ...]:
        at = zip(self.keyed, key, strict=True)
        blocks = {axis: slice(k * self.block[axis], (k + 1) * self.block[axis]) for axis, k in at}
        return tuple(blocks.get(a.name, slice(None)) for a in self.tile.axes)

    def took(self, keys: list[tuple[int, ...]], consumer: str) -> None:
        for key in keys:
            if self.taken(key, consumer):
                for sent in self.memories.values():
                    sent.known[self.region(key)] = False


def _grid(positions: list[Array]) -> tuple[Array, ...]:
    """An index of all combinations."""
    return torch.meshgrid(*positions, indexing="ij") if positions else ()
