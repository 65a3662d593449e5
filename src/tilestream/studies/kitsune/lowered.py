"""A subgraph's stages as a pipeline of the IR: tile ops over axes, loops over rows, meshes, queues.

One queue serves all stages that read a tile (multicast). A sum over rows is Partial over the CTAs of its stage, and the
final stage takes the sum of their parts (a tree of queues). Operators of one stage are neighbours in it (epilogues).
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, prod

from torch import fx

from tilestream.errors import PlanError
from tilestream.graph.nodes import Unsupported, name
from tilestream.graph.provenance import source
from tilestream.graph.sentences.program import Program, Stored, program
from tilestream.graph.sentences.views import is_view
from tilestream.graph.sentences.writer import Given, Result
from tilestream.ir import pipeline as ir
from tilestream.ir.axes import At, Axis, Level, Loop, Spread, View
from tilestream.ir.derive import mentions, sums
from tilestream.studies.kitsune.operators import OperatorGraph
from tilestream.studies.kitsune.pipeline import Half, Spatial
from tilestream.studies.kitsune.sources import base, is_free, users


@dataclass(frozen=True)
class Streamed:
    """One launch: ``pipeline``, the nodes whose values are its inputs, and the results that its outputs are."""

    pipeline: ir.Pipeline
    given: tuple[Given, ...]
    stored: tuple[Stored, ...]


def streamed(p: Spatial, graph: OperatorGraph) -> Streamed:
    """``p``, of operators of ``graph``, as a pipeline.

    Raises:
        CaptureError: the graph was made by hand, and has no nodes.
        PlanError: an operator has no sentence over axes.
    """
    try:
        return _streamed(p, graph.nodes, graph.recorded.stored if graph.recorded else ())
    except Unsupported as why:
        where = (source(why.node) or name(why.node)) if why.node is not None else p.node.name
        raise PlanError(
            f"{where} is in pipeline {p.node.name!r} and no sentence over axes: {why.reason}",
            "leave it out of the library of patterns, or write its sentence (graph/sentences)",
        ) from why


def _streamed(p: Spatial, nodes: Mapping[str, Sequence[fx.Node]], parameters: Collection[str]) -> Streamed:
    finals = p.finals()
    members = {node for op in p.node.ops for node in nodes[op]}
    groups = {
        s.name: _with_views([n for op in s.ops for n in nodes[op]], members)
        for s in p.stages
        if s.half is not Half.FINAL
    }
    inside = {node for part in groups.values() for node in part}
    leaving = [result for node in inside if node in members for result in _leaving(node, inside)]
    order = {node: i for i, node in enumerate(next(iter(members)).graph.nodes)}
    leaving.sort(key=lambda result: (order[result[0]], result[1]))
    whole = [n for node in inside for n in node.all_input_nodes if base(n).name in parameters]
    whole += [base(n) for n in whole]
    try:
        made = program(_with_outer_views(groups), leaving, whole)
    except Unsupported:  # a view of an input that divides it otherwise: torch makes it, and it is an input itself
        made = program(groups, leaving, whole)
    return _Builder(p, made, {n: op for op in finals for n in nodes[op]}).build()


def _with_outer_views(groups: Mapping[str, Sequence[fx.Node]]) -> dict[str, list[fx.Node]]:
    """``groups``, and the views by which they read what is made outside: two views of one input are one input."""
    found = {name: list(part) for name, part in groups.items()}
    inside = {node for part in groups.values() for node in part}
    for part in found.values():
        todo = list(part)
        while todo:
            for n in todo.pop().all_input_nodes:
                if n not in inside and n.op == "call_function" and is_view(n):
                    inside.add(n)
                    part.append(n)
                    todo.append(n)
    return found


def _with_views(nodes: Sequence[fx.Node], members: Collection[fx.Node]) -> list[fx.Node]:
    """``nodes``, and what is free behind them and read by other members."""
    found = dict.fromkeys(nodes)
    todo = list(nodes)
    while todo:
        for user in todo.pop().users:
            if is_free(user) and user not in found and base(user) in found and any(u in members for u in users(user)):
                found[user] = None
                todo.append(user)
    return list(found)


def _leaving(node: fx.Node, inside: Collection[fx.Node]) -> Iterator[Result]:
    """The results of ``node`` that anything outside reads, directly or by a view."""

    def outside(at: fx.Node) -> bool:
        return any((outside(user) if is_free(user) else True) for user in at.users if user not in inside) or any(
            outside(user) for user in at.users if user in inside and is_free(user)
        )

    if not isinstance(node.meta.get("val"), list | tuple):
        if outside(node) or not node.users:
            yield node, 0
        return
    for part in node.users:
        if outside(part):
            yield node, int(part.args[1])  # pyright: ignore[reportArgumentType]


@dataclass
class _Builder:
    """Stages and queues of one program; ``split`` are the nodes of operators whose sums are finished elsewhere."""

    p: Spatial
    program: Program
    split: Mapping[fx.Node, str]

    def build(self) -> Streamed:
        ops = {name: list(part) for name, part in self.program.ops.items()}
        finals: dict[str, list[ir.TileOp]] = {s.name: [] for s in self.p.finals().values()}
        for stored in self.program.stored:
            operator = self.split.get(stored.result[0])
            if operator is None:
                ops[stored.group] += stored.ops
            else:
                finals[self.p.finals()[operator].name] += _finish(stored)
        live = _used(ops | {name: part for name, part in finals.items() if part})
        home = {op.out.name: name for name, part in live.items() for op in part if op.out is not None}
        stages = tuple(self._stage(name, part) for name, part in live.items())
        queues = tuple(self._queues(stages, home))
        taken = {n for part in live.values() for op in part for v in op.views for n in (v.of, *_indices(v))}
        tensors = tuple(t for t in self.program.tensors if t.name in taken)
        made = ir.Pipeline(self.p.node.name, tensors, stages, queues, "spatial")
        given = tuple(g for g in self.program.given if g.tensor.name in taken)
        return Streamed(made, given, self.program.stored)

    def _stage(self, name: str, ops: Sequence[ir.TileOp]) -> ir.Stage:
        stage = self.p.stage(name)
        found = set().union(*map(mentions, ops))
        if stage.half is Half.FINAL:
            return ir.Stage(name, tuple(ops), (), self._shared(name, ops[0].out))
        loops = tuple(Loop(a.name, self._block(a)) for a in self.program.streams if a.name in found)
        looped = {loop.axis for loop in loops}
        stationary = stage.half is Half.WHOLE and any(op.kind == "product" for op in ops)
        stationary &= all(not sums(op).isdisjoint(looped) for op in ops if op.kind == "product")
        if stationary:
            result = next(op.out for op in reversed(ops) if op.kind == "product")
            return ir.Stage(name, tuple(_by_pass(ops, looped)), loops, self._shared(name, result))
        return ir.Stage(name, tuple(_by_pass(ops, looped)), loops, self._dealt(name, found))

    def _block(self, axis: Axis) -> int:
        """What a step takes of a stream: the tile's rows, or one of a batch."""
        return min(self.p.rows or ir.TILE_ROWS, axis.size or 1) if axis == self.program.streams[-1] else 1

    def _dealt(self, name: str, found: Collection[str]) -> tuple[Spread, ...]:
        """The stage's CTAs share the blocks of the stream that has most of them."""
        blocks = {a.name: ceil((a.size or 1) / self._block(a)) for a in self.program.streams if a.name in found}
        return self._spread(name, max(blocks, key=blocks.__getitem__), blocks) if blocks else ()

    def _shared(self, name: str, result: ir.Tile | None) -> tuple[Spread, ...]:
        """The stage's CTAs share the results by blocks of their first axis."""
        sizes = {a.name: a.size or 1 for a in (result.axes if result is not None else ())}
        return self._spread(name, next(iter(sizes)), sizes) if sizes else ()

    def _spread(self, name: str, axis: str, blocks: Mapping[str, int]) -> tuple[Spread, ...]:
        count = min(self.p.ctas.get(name, 1), blocks[axis])
        return (Spread(Level.GRID, count, (axis,)),)

    def _queues(self, stages: Sequence[ir.Stage], home: Mapping[str, str]) -> Iterator[ir.Queue]:
        readers: dict[str, list[str]] = {}
        for stage in stages:
            for tile in stage.taken():
                readers.setdefault(tile, []).append(stage.name)
        edges = [(home[tile], name) for tile, names in readers.items() for name in names]
        workers = {s.name: s.replicas for s in stages}
        tiles = {s.name: s.defined() for s in stages}
        loops = {s.name: {loop.axis: loop.tile for loop in s.loops} for s in stages}
        for tile, names in readers.items():
            producer = home[tile]
            # What passes by on a longer way while a reader waits, a step of every stage on it, and both ends' own.
            between = {s for name in names for s in _between(edges, producer, name)}
            depth = 2 * sum(workers[s] for s in {producer, *names, *between})
            loop = loops[producer]
            keyed = [a for a in tiles[producer][tile].axes if a.name in loop]
            if any(a.name not in loops[name] for a in keyed for name in names):  # a reader that takes all at once
                depth += prod(ceil((a.size or 1) / loop[a.name]) for a in keyed)
            yield ir.Queue(tile, producer, tuple(names), depth=depth)


def _finish(stored: Stored) -> list[ir.TileOp]:
    """The final stage's ops: the parts of all CTAs are one when it takes them, and go to memory."""
    tile = stored.tile
    total = ir.Tile(f"{tile.name}.total", tile.axes, tile.dtype)
    own = View(tile.name, tuple(At((a.name,)) for a in tile.axes))
    store = stored.op
    (read,) = store.views[:1]
    return [
        ir.TileOp("copy", total, (own,), source=store.source),
        ir.TileOp("store", None, (View(total.name, read.at),), store.tensors, source=store.source),
    ]


def _used(groups: Mapping[str, Sequence[ir.TileOp]]) -> dict[str, list[ir.TileOp]]:
    """Without ops whose tiles nobody uses."""
    live = {name: list(ops) for name, ops in groups.items()}
    while True:
        used = {n for ops in live.values() for op in ops for n in op.ins}
        kept = {n: [op for op in ops if op.out is None or op.out.name in used] for n, ops in live.items()}
        if kept == live:
            return {name: ops for name, ops in live.items() if ops}
        live = kept


def _by_pass(ops: Sequence[ir.TileOp], looped: Collection[str]) -> list[ir.TileOp]:
    """Ops in the order of the passes that they belong to: before the loops, inside, behind, a second pass."""
    level: dict[str, int] = {}
    found: list[tuple[int, ir.TileOp]] = []
    for op in ops:
        after = max((level.get(n, 0) for n in op.ins), default=0)
        inside = not mentions(op).isdisjoint(looped)
        at = after if after % 2 == inside else after + 1
        if op.out is not None:
            level[op.out.name] = at + 1 if not sums(op).isdisjoint(looped) else at
        found.append((at, op))
    return [op for _, op in sorted(found, key=lambda each: each[0])]


def _between(edges: Sequence[tuple[str, str]], start: str, end: str) -> set[str]:
    """Stages on a way from ``start`` to ``end``."""

    def reach(at: str, step: int) -> set[str]:
        seen: set[str] = set()
        todo = [at]
        while todo:
            here = todo.pop()
            new = {edge[1 - step] for edge in edges if edge[step] == here} - seen
            seen |= new
            todo += new
        return seen

    return reach(start, 0) & reach(end, 1)


def _indices(view: View) -> Iterator[str]:
    return (at.index for at in view.at or () if at.index)
