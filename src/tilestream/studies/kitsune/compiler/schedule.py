"""The schedule of a pipeline: blocks of its loops, the mesh of every stage, the depth of its queues."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from math import ceil, prod

from tilestream.ir.axes import Level, Loop, Spread
from tilestream.ir.derive import sums
from tilestream.ir.pipeline import Pipeline, Queue
from tilestream.ir.rings import at_once, blocks, in_flight, keyed, least_depth
from tilestream.studies.kitsune.compiler.split_reductions import SUM_COLUMNS
from tilestream.studies.kitsune.compiler.staged import STREAM, Staged
from tilestream.studies.kitsune.compiler.tiling import Tile
from tilestream.studies.kitsune.compiler.ways import beside, heaviest


def scheduled(p: Staged, tile: Tile, ctas: Mapping[str, int], limit: str = "") -> Staged:
    """``p`` with tiles of ``tile``, and stages of so many CTAs, which are ``expressible``."""
    stages = []
    for stage in p.pipeline.stages:
        loops = tuple(Loop(x.axis, _block(x.axis, tile)) for x in stage.loops)
        stage = replace(stage, loops=loops)
        parts = _parts(_blocks(p, stage.name, tile), ctas[stage.name])
        mesh = tuple(Spread(Level.GRID, n, (axis,)) for axis, n in parts.items())
        stages.append(replace(stage, mesh=mesh))
    made = p.pipeline.with_stages(tuple(stages))
    deep = tuple(replace(q, depth=_depth(made, q)) for q in made.queues)
    return replace(p, pipeline=replace(made, queues=deep), columns=tile.columns, limit=limit)


def tile_of(p: Staged) -> Tile:
    """The tile that ``p`` was scheduled with."""
    rows = max(loop.tile for s in p.pipeline.stages for loop in s.loops if loop.axis == STREAM)
    return Tile(rows, p.columns)


def expressible(p: Staged, name: str, tile: Tile, most: int) -> Sequence[int]:
    """The numbers of CTAs of a stage, up to ``most``, that a mesh of its axes can have."""
    return _sizes(tuple(_blocks(p, name, tile).values()), most)


@lru_cache(maxsize=4096)
def _sizes(blocks: tuple[int, ...], most: int) -> Sequence[int]:
    if not blocks or most <= blocks[0]:
        return range(1, (most if blocks else 1) + 1)
    axes = {str(i): n for i, n in enumerate(blocks)}
    return tuple(n for n in range(1, most + 1) if prod(_parts(axes, n).values()) == n)


def _block(axis: str, tile: Tile) -> int:
    """What a step takes of a stream: the tile's rows, or one of a batch."""
    return tile.rows if axis == STREAM else 1


def _blocks(p: Staged, name: str, tile: Tile) -> dict[str, int]:
    """Into how many parts CTAs can divide what a stage does, by axis, the best to divide first.

    Those of a stage that streams are dealt blocks of the streams, the one of most blocks first, and then divide the
    other axes of its result, the last by blocks of columns. Those of sums, which need all of the stream, divide the
    results.
    """
    streams, own = _divisible(p, name)
    dealt = {axis: ceil(size / _block(axis, tile)) for axis, size in streams.items()}
    found = dict(sorted(dealt.items(), key=lambda item: -item[1]))
    return found | {axis: ceil(size / (block or tile.columns)) for axis, (size, block) in own.items()}


@lru_cache(maxsize=4096)
def _divisible(p: Staged, name: str) -> tuple[dict[str, int], dict[str, tuple[int, int]]]:
    """The streams that CTAs of a stage are dealt, and the other axes that they divide, each with its size; of these
    with their blocks too, 0 for those that the tile's columns are."""
    size, stage = p.pipeline.sizes(), p.pipeline.stage(name)
    looped = {loop.axis for loop in stage.loops}
    products = [op for op in stage.ops if op.kind == "product"]
    stationary = bool(products) and not p.is_partial(name)
    stationary &= all(not sums(op).isdisjoint(looped) for op in products)
    results = [op.out for op in products or stage.ops if op.out is not None]
    head = max(results, key=lambda tile: prod(a.size or 1 for a in tile.axes))
    own = [a.name for a in head.axes if a.name not in looped]
    if not stage.loops or stationary:
        return {}, {a: (size[a], 1) for a in own}
    streams = {a: size[a] for a in p.streams if a in looped}
    if p.is_partial(name):
        return streams, {a: (size[a], SUM_COLUMNS) for a in own}
    whole = {a for op in stage.ops for a in sums(op)}
    return streams, {a: (size[a], 0 if a == own[-1] else 1) for a in own if a not in whole}


def _parts(blocks: Mapping[str, int], count: int) -> dict[str, int]:
    """A mesh of at most ``count`` workers that divide ``blocks``: as many as can be, along as few axes."""
    best: dict[str, int] = {}
    (axis, first), *rest = blocks.items() or [("", 1)]
    if not axis:
        return {}
    if not rest or count <= first:
        return {axis: max(1, min(count, first))}
    for others in range(ceil(count / first), min(count, prod(n for _, n in rest)) + 1):
        more = _parts(dict(rest), others)
        made = {axis: min(first, count // prod(more.values())), **more}
        if prod(made.values()) > prod(best.values()) or not best:
            best = made
        if prod(best.values()) == count or others > 2 * ceil(count / first) + 8:
            break
    return best or {axis: first}


def _depth(p: Pipeline, q: Queue) -> int:
    """Room for two steps of the wider end (Kitsune 2.1: double buffers), and of every stage on the longest other way,
    whose tiles these wait for (skip connections); at least what lets all of them go on, at most all that there is."""
    axes, size = keyed(p, q), p.sizes()
    many = blocks(axes, size)

    def step(name: str) -> list[int]:
        return at_once(p.stage(name), axes, size) or many

    least = most = 1
    for consumer in q.consumers:
        late = sorted(beside(p, q.producer, consumer))
        made, taken, *others = in_flight([step(name) for name in (q.producer, consumer, *late)], many)
        waited = heaviest(p, consumer, dict(zip(late, others, strict=True)))
        least = max(least, made + waited + taken if waited else least_depth(made, taken))
        most = max(most, 2 * (max(made, taken) + waited))
    return max(least, min(most, prod(many)))
