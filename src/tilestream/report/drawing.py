"""A pipeline as inline SVG: stages left to right in the order that data takes, queues as arrows between them."""

from __future__ import annotations

from dataclasses import dataclass
from html import escape
from typing import Any

from tilestream.ir.pipeline import Pipeline, Queue, Transport
from tilestream.ir.plain import by_rows
from tilestream.ir.taps import Tap
from tilestream.report import facts, nest_drawing
from tilestream.report.explain import sms
from tilestream.report.words import size

BOX = 172
GAP = 84
LINE = 15
HEAD = 46
PAD = 14
COLOURS = 8
NAME, OP = 19, 20
"""Characters of a name and of an op that fit into a box."""


def caption(pipeline: Pipeline) -> str:
    """How to read the drawing of a pipeline."""
    if not by_rows(pipeline):
        return "A box is a stage: the loops of its kernel from outside to inside, and what each step does."
    if len(pipeline.stages) == 1:
        return (
            "One stage, which runs these layers one after another. A block is a layer (columns in→columns out) or a "
            "load or store; it is as tall as its result has columns. Below it: what follows the product."
        )
    return (
        "A box is a stage; a line is what one hands to the next. Solid: a queue in the L2 cache, so many tiles × bytes "
        "of a tile. Dashed: a whole tensor in DRAM, which the next kernel reads when all of it is there."
    )


@dataclass
class _Box:
    stage: dict[str, Any]
    lines: list[tuple[str, str]]
    column: int
    x: float = 0.0
    y: float = 0.0

    @property
    def height(self) -> float:
        return HEAD + LINE * len(self.lines) + 10


def svg(pipeline: Pipeline) -> str:
    """The whole pipeline, DRAM queues included, as one ``<svg>`` element; a single stage shows its layers."""
    if not by_rows(pipeline):
        return nest_drawing.svg(pipeline)
    described = [s for launch in facts.pipeline_facts(pipeline)["launches"] for s in launch["stages"]]
    if len(described) == 1:
        return _single(pipeline, described[0])
    columns = _columns(pipeline)
    boxes = {s["name"]: _Box(s, _lines(s["summary"]), columns[s["name"]]) for s in described}
    arcs = [q for q in pipeline.queues if any(columns[c] - columns[q.producer] > 1 for c in q.consumers)]
    top = PAD + (26 + 14 * len(arcs) if arcs else 8)
    width, height = _place(boxes, top)
    parts = [
        f'<svg class="pipeline" viewBox="0 0 {width:.0f} {height:.0f}" width="{width:.0f}" height="{height:.0f}" '
        f'role="img" aria-label="pipeline {escape(pipeline.name)}">',
    ]
    for index, queue in enumerate(pipeline.queues):
        parts += _arrows(queue, pipeline, boxes, top, arcs.index(queue) if queue in arcs else index)
    parts += [_draw(box, index) for index, box in enumerate(boxes.values())]
    return "".join([*parts, "</svg>"])


def _single(pipeline: Pipeline, stage: dict[str, Any]) -> str:
    """One stage as its layers in order: a block a linear, as tall as its result is wide."""
    blocks = _blocks(pipeline)
    tallest = max(b.features for b in blocks)
    pitch, floor = 66, HEAD + 128
    width, height = max(420, 2 * PAD + 22 + pitch * len(blocks)), floor + 72 + PAD
    parts = [
        f'<svg class="pipeline" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
        f'aria-label="pipeline {escape(pipeline.name)}">',
        f'<g class="stage" transform="translate({PAD},{PAD})">',
        f'<rect class="box" width="{width - 2 * PAD}" height="{height - 2 * PAD}" rx="7"/>',
        f'<text class="name" x="11" y="22">{escape(shorter(stage["name"], 44))}</text>',
        f'<text class="detail" x="11" y="37">{escape(_where(stage))}, weights {stage["residency"]}</text>',
    ]
    for index, block in enumerate(blocks):
        x, tall = 14 + index * pitch, max(4.0, 110 * block.features / tallest)
        middle = x + pitch / 2 - 4
        parts.append(
            f'<rect class="{block.colour}" x="{x}" y="{floor - tall:.1f}" width="{pitch - 8}" height="{tall:.1f}" '
            f'rx="3"><title>{escape(block.source)}</title></rect>'
        )
        for n, line in enumerate((block.title, *block.after)):
            kind = "label strong" if n == 0 else "label"
            parts.append(f'<text class="{kind}" x="{middle:.0f}" y="{floor + 15 + 13 * n}">{escape(line)}</text>')
    return "".join([*parts, "</g></svg>"])


@dataclass
class _Block:
    """A load, a linear with what follows it, or a store."""

    title: str
    features: int
    colour: str
    source: str
    after: list[str]


def _blocks(pipeline: Pipeline) -> list[_Block]:
    blocks: list[_Block] = []
    for op in pipeline.stages[0].ops:
        if op.kind == "linear":
            outs, ins = pipeline.tensor(op.params[0]).shape
            blocks.append(_Block(f"{ins}→{outs}", outs, "s0", op.source, []))
        elif op.kind in ("load", "store"):
            features = pipeline.tensor(op.params[0]).features
            word = "gather" if op.index else "tap" if Tap.of(op) else op.kind
            blocks.append(_Block(f"{word} {features}", features, "s1", op.source, []))
        elif blocks and len(blocks[-1].after) < 4:
            after = blocks[-1].after
            after.append("…" if len(after) == 3 else op.kind)
    return blocks


def _where(stage: dict[str, Any]) -> str:
    where = f"SM{'s' * (stage['replicas'] > 1)} {sms(stage)}"
    return f"{where} · {size(stage['shared_bytes'])}" if stage["shared_bytes"] else where


def _columns(pipeline: Pipeline) -> dict[str, int]:
    """Longest way from a source, which puts every consumer to the right of its producers."""
    depth = {s.name: 0 for s in pipeline.stages}
    for _ in pipeline.stages:  # as many rounds as the longest path can have
        for q in pipeline.queues:
            for c in q.consumers:
                depth[c] = max(depth[c], depth[q.producer] + 1)
    return depth


def _lines(summary: str) -> list[tuple[str, str]]:
    """Lines of a box with their CSS class: memory, linear or plain."""
    made = []
    for word in summary.split(", "):
        kind = (
            "memory"
            if word.startswith(("load", "gather", "store"))
            else "linear"
            if word.startswith("linear")
            else "plain"
        )
        text = word.replace(">", "→").replace("linear ", "").replace("(x", "(×") if kind == "linear" else word
        made.append((kind, shorter(text, OP)))
    return made


def shorter(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"


def _place(boxes: dict[str, _Box], top: float) -> tuple[float, float]:
    columns: dict[int, list[_Box]] = {}
    for box in boxes.values():
        columns.setdefault(box.column, []).append(box)
    tallest = max(sum(b.height + 18 for b in column) - 18 for column in columns.values())
    for index, column in columns.items():
        y = top
        for box in column:
            box.x, box.y = PAD + index * (BOX + GAP), y
            y += box.height + 18
    return 2 * PAD + len(columns) * (BOX + GAP) - GAP, top + tallest + PAD


def _draw(box: _Box, index: int) -> str:
    stage = box.stage
    body = [
        f'<g class="stage" transform="translate({box.x:.1f},{box.y:.1f})">',
        f"<title>{escape(stage['source'])}</title>" if stage["source"] else "",
        f'<rect class="box" width="{BOX}" height="{box.height}" rx="7"/>',
        f'<rect class="bar s{index % COLOURS}" width="{BOX}" height="4" rx="2"/>',
        f'<text class="name" x="11" y="22">{escape(shorter(stage["name"], NAME))}</text>',
        f'<text class="detail" x="11" y="37">{escape(shorter(_where(stage), 27))}</text>',
    ]
    for n, (kind, text) in enumerate(box.lines):
        body.append(f'<text class="op {kind}" x="11" y="{HEAD + 11 + n * LINE}">{escape(text)}</text>')
    return "".join([*body, "</g>"])


def _arrows(queue: Queue, pipeline: Pipeline, boxes: dict[str, _Box], top: float, lane: int) -> list[str]:
    """One path a consumer; a queue that passes over other stages goes above them in a lane of its own."""
    made = []
    fact = facts.queue_facts(pipeline, queue)
    kind = "dram" if queue.transport is Transport.DRAM else "l2"
    ring = "whole tensor" if kind == "dram" else f"{queue.depth} × {size(fact['tile_bytes'])}"
    a = boxes[queue.producer]
    x0, y0 = a.x + BOX, a.y + min(a.height, HEAD) / 2 + 8
    for number, consumer in enumerate(queue.consumers):
        b = boxes[consumer]
        x1, y1 = b.x, b.y + min(b.height, HEAD) / 2 + 8
        if b.column - a.column > 1:
            y = top - 16 - 14 * lane
            path = (
                f"M{x0:.1f} {y0:.1f} C{x0 + 40:.1f} {y0:.1f} {x0 + 10:.1f} {y:.1f} {x0 + 60:.1f} {y:.1f} "
                f"L{x1 - 60:.1f} {y:.1f} C{x1 - 10:.1f} {y:.1f} {x1 - 40:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
            )
            at, labels_y = (x0 + x1) / 2, y - 4
        else:
            middle = (x0 + x1) / 2
            path = f"M{x0:.1f} {y0:.1f} C{middle:.1f} {y0:.1f} {middle:.1f} {y1:.1f} {x1:.1f} {y1:.1f}"
            at, labels_y = middle, (y0 + y1) / 2 - 7
        made.append(f'<path class="queue {kind}" d="{path}"/>')
        made.append(
            f'<path class="tip" d="M{x1 - 7:.1f} {y1 - 4:.1f} L{x1:.1f} {y1:.1f} L{x1 - 7:.1f} {y1 + 4:.1f} z"/>'
        )
        if number == 0:
            wide = b.column - a.column > 1
            text = f"{fact['features']} {fact['dtype']}" + (f", {ring}" if wide else "")
            made.append(f'<text class="label" x="{at:.1f}" y="{labels_y:.1f}">{escape(text)}</text>')
            if not wide:
                made.append(f'<text class="label" x="{at:.1f}" y="{labels_y + 20:.1f}">{escape(ring)}</text>')
    return made
