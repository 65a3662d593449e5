"""A pipeline of any axes as inline SVG: each stage as its nest of loops, what its workers exchange, its queues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape

from tilestream.ir.axes import Level
from tilestream.ir.derive import Exchange, Nest, exchanges, held, loops_of
from tilestream.ir.pipeline import Pipeline, Queue, Stage, TileOp, Transport
from tilestream.ir.plain import plain
from tilestream.ir.text import show_op

LINE, HEAD, PAD, INDENT = 16, 28, 14, 16
CHARACTER = 7.0  # width of one, as large as text is in a drawing
GAP = 52  # between stages, one below the other
MOST = 110  # characters of a line

WORKERS = {Level.GRID: "CTAs of the grid", Level.CLUSTER: "CTAs of a cluster", Level.WARPGROUP: "warpgroups of a CTA"}
THROUGH = {Level.GRID: "L2", Level.CLUSTER: "DSM", Level.WARPGROUP: "shared memory"}
LANE = 18  # between the lines of two queues


@dataclass(frozen=True)
class Row:
    """A line of a stage's box. ``kind`` is its style: mesh, loop, exchange, held, memory, linear or plain."""

    kind: str
    indent: int
    text: str
    source: str = ""


def svg(pipeline: Pipeline) -> str:
    """The whole pipeline as one ``<svg>`` element, stages from top to bottom in the order they are listed."""
    p = plain(pipeline)
    boxes = [(stage.name, rows(stage)) for stage in p.stages]
    longest = max(INDENT * row.indent + CHARACTER * min(len(row.text), MOST) for _, lines in boxes for row in lines)
    width = max(420.0, longest + 24)
    parts: list[str] = []
    places: dict[str, tuple[float, float]] = {}  # top and bottom of a stage's box
    top = float(PAD)
    for index, (name, lines) in enumerate(boxes):
        places[name] = (top, top + HEAD + LINE * len(lines) + 10)
        parts += _box(name, lines, *places[name], width, index)
        top = places[name][1] + GAP
    ways = [(queue, consumer) for queue in p.queues for consumer in queue.consumers]
    for n, (queue, consumer) in enumerate(ways):
        parts += _arrow(queue, places[queue.producer][1], places[consumer][0], PAD + width, LANE * (n + 1))
    whole = 2 * PAD + width + (LANE * (len(ways) + 1) + 190 if ways else 0)
    size = f'viewBox="0 0 {whole:.0f} {top - GAP + PAD:.0f}" width="{whole:.0f}"'
    head = f'<svg class="pipeline" {size} role="img" aria-label="pipeline {escape(pipeline.name)}">'
    return "".join([head, *parts, "</svg>"])


def rows(stage: Stage) -> list[Row]:
    """What a stage's box says: the mesh, then the nest of its loops with ops, what moves before each, what is whole."""
    made = [
        Row("mesh", 0, f"{d.size} {WORKERS[d.level]} divide {', then '.join(d.axes) or 'columns'}") for d in stage.mesh
    ]
    tiles = stage.blocks
    moved: dict[int, list[Exchange]] = {}
    for each in exchanges(stage):
        moved.setdefault(id(each.op), []).append(each)
    return [*made, *_nest(loops_of(stage), stage, tiles, moved, 0)]


def _nest(
    body: Sequence[TileOp | Nest], stage: Stage, tiles: dict[str, int], moved: dict[int, list[Exchange]], depth: int
) -> Iterator[Row]:
    for item in body:
        if isinstance(item, Nest):
            within = f" of each {stage.outer[item.axis]}" if item.axis in stage.outer else ""
            yield Row("loop", depth, f"for {item.axis}{within}, {tiles[item.axis]} a turn")
            yield from _nest(item.body, stage, tiles, moved, depth + 1)
            continue
        for each in moved.get(id(item), ()):
            yield Row("exchange", depth, f"{each.how} of {each.tile} through {THROUGH[each.level]}")
        whole = held(stage, item.out.name) if item.out is not None and stage.loops else ()
        kept = f"   ({', '.join(whole)} whole)" if whole else ""
        yield Row(_kind(item), depth, show_op(item) + kept, item.source)


def _kind(op: TileOp) -> str:
    if op.kind in ("load", "store", "store_add"):
        return "memory"
    return "linear" if op.kind == "product" else "plain"


def _box(name: str, lines: Sequence[Row], top: float, bottom: float, width: float, index: int) -> Iterator[str]:
    yield f'<g class="stage" transform="translate({PAD},{top:.1f})">'
    yield f'<rect class="box" width="{width:.1f}" height="{bottom - top:.1f}" rx="7"/>'
    yield f'<rect class="bar s{index % 8}" width="{width:.1f}" height="4" rx="2"/>'
    yield f'<text class="name" x="11" y="22">{escape(name)}</text>'
    for n, row in enumerate(lines):
        text = row.text if len(row.text) <= MOST else row.text[: MOST - 1] + "…"
        title = f"<title>{escape(row.source)}</title>" if row.source else ""
        at = f'x="{11 + INDENT * row.indent}" y="{HEAD + LINE * (n + 1) - 3}"'
        yield f'<text class="op {row.kind}" {at}>{title}{escape(text)}</text>'
    yield "</g>"


def _arrow(queue: Queue, bottom: float, top: float, edge: float, lane: float) -> Iterator[str]:
    """From the right side of the producer, along a lane of its own, to the right side of the consumer."""
    start, end, x = bottom - 14, top + 16, edge + lane
    kind = "dram" if queue.transport is Transport.DRAM else "l2"
    ring = "whole, in DRAM" if kind == "dram" else f"{queue.depth} tiles in {queue.transport.value.upper()}"
    yield f'<path class="queue {kind}" d="M{edge:.1f} {start:.1f} H{x:.1f} V{end:.1f} H{edge:.1f}"/>'
    yield f'<path class="tip" d="M{edge + 7:.1f} {end - 4:.1f} L{edge:.1f} {end:.1f} L{edge + 7:.1f} {end + 4:.1f} z"/>'
    label = f'class="label start" x="{x + 6:.1f}" y="{(start + end) / 2 + 4:.1f}"'
    yield f"<text {label}>{escape(queue.tile)}: {ring}</text>"
