"""A stream graph as SVG: primitives top to bottom in the order that tokens take, with tokens and stalls of a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from html import escape

from tilestream.sparse.stream.graph import Graph, Node
from tilestream.sparse.stream.result import NodeStats, Result

BOX, HEIGHT, GAP, LEVEL, PAD = 148, 66, 18, 48, 16

STYLE = """
.stream{font:11px ui-sans-serif,system-ui,sans-serif;background:#fff}
.stream rect.box{fill:#f6f7f9;stroke:#8b94a3}
.stream text{fill:#1c2430}.stream .name{font-weight:600}.stream .detail{fill:#5b6675}
.stream path{fill:none;stroke:#9aa5b4;stroke-width:1.1}
.stream path.crd{stroke:#2f6fbb}.stream path.val{stroke:#b5482a}.stream path.ref{stroke:#6b7a35}
.stream .busy{fill:#3d7d4f}.stream .input{fill:#e0a93b}.stream .room{fill:#b5482a}.stream .memory{fill:#7a57a8}
"""

KEY = (("busy", "busy"), ("input", "waits for input"), ("room", "waits for room"), ("memory", "waits for memory"))


@dataclass(frozen=True)
class _Place:
    x: float
    y: float


def svg(graph: Graph, result: Result | None = None) -> str:
    """One ``<svg>`` element. Broadcasts are drawn as streams that part; with ``result``, each node shows its tokens.

    The bar of a node is the run's cycles: its own busy cycles, then what it waited for.
    """
    drawn = [node for node in graph.nodes if node.kind != "broadcast"]
    source = _through_broadcasts(graph)
    levels = _levels(drawn, source)
    places = _places(drawn, levels, source)
    width = max((p.x for p in places.values()), default=0) + BOX + PAD
    height = max((p.y for p in places.values()), default=0) + HEIGHT + PAD + 22
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="stream" viewBox="0 0 {width:.0f} {height:.0f}" '
        f'width="{width:.0f}" height="{height:.0f}" role="img" aria-label="stream graph {escape(graph.name)}">',
        f"<style>{STYLE}</style>",
    ]
    for node in drawn:
        for port, stream in node.ins:
            origin, out = source[(stream.node, stream.port)]
            parts.append(_arrow(places[origin], places[node.name], _kind(out, port)))
    stats = {s.name: s for s in result.nodes} if result else {}
    for node in drawn:
        parts.append(_box(node, places[node.name], stats.get(node.name), result.cycles if result else 0))
    if result:
        parts.append(_key(height))
    return "".join([*parts, "</svg>"])


def _through_broadcasts(graph: Graph) -> dict[tuple[str, str], tuple[str, str]]:
    """Of every stream, the node and port that it comes from when broadcasts are left out."""
    source: dict[tuple[str, str], tuple[str, str]] = {}
    for node in graph.nodes:
        for port in node.outs:
            if node.kind == "broadcast":
                stream = node.input("in")
                source[(node.name, port)] = source[(stream.node, stream.port)]
            else:
                source[(node.name, port)] = (node.name, port)
    return source


def _levels(drawn: list[Node], source: Mapping[tuple[str, str], tuple[str, str]]) -> dict[str, int]:
    levels: dict[str, int] = {}
    for node in drawn:
        before = [levels[source[(s.node, s.port)][0]] for _, s in node.ins]
        levels[node.name] = max(before, default=-1) + 1
    consumers: dict[str, list[int]] = {}
    for node in drawn:
        for _, s in node.ins:
            consumers.setdefault(source[(s.node, s.port)][0], []).append(levels[node.name])
    for node in drawn:  # a root stands right above what it feeds
        if not node.ins and node.name in consumers:
            levels[node.name] = min(consumers[node.name]) - 1
    return levels


def _places(
    drawn: list[Node], levels: Mapping[str, int], source: Mapping[tuple[str, str], tuple[str, str]]
) -> dict[str, _Place]:
    """Below the mean of what a node reads, as far as its neighbours in the row leave room."""
    rows: dict[int, list[Node]] = {}
    for node in drawn:
        rows.setdefault(levels[node.name], []).append(node)
    places: dict[str, _Place] = {}
    for level in sorted(rows):
        wanted = []
        for order, node in enumerate(rows[level]):
            above = [places[source[(s.node, s.port)][0]].x for _, s in node.ins]
            wanted.append((sum(above) / len(above) if above else PAD + order * (BOX + GAP), order, node))
        left = float(PAD)
        for x, _, node in sorted(wanted, key=lambda w: w[:2]):
            left = max(left, x)
            places[node.name] = _Place(left, PAD + level * (HEIGHT + LEVEL))
            left += BOX + GAP
    return places


def _kind(out: str, port: str) -> str:
    stem = (out if out != "out" else port).rstrip("0123456789")
    return stem if stem in ("crd", "ref", "val") else "any"


def _arrow(start: _Place, end: _Place, kind: str) -> str:
    x0, y0, x1, y1 = start.x + BOX / 2, start.y + HEIGHT, end.x + BOX / 2, end.y
    bend = max(20.0, (y1 - y0) / 2)
    curve = f"M{x0:.0f},{y0:.0f} C{x0:.0f},{y0 + bend:.0f} {x1:.0f},{y1 - bend:.0f} {x1:.0f},{y1:.0f}"
    return f'<path class="{kind}" d="{curve}"/>'


def _box(node: Node, at: _Place, stats: NodeStats | None, cycles: int) -> str:
    given = dict(node.attrs)
    detail = " ".join(str(given[k]) for k in ("tensor", "level", "op", "order", "scalar", "ways") if k in given)
    parts = [
        f'<g transform="translate({at.x:.0f},{at.y:.0f})"><title>{escape(_title(node, stats))}</title>',
        f'<rect class="box" width="{BOX}" height="{HEIGHT}" rx="5"/>',
        f'<text class="name" x="8" y="16">{escape(_short(f"{node.kind} {detail}".strip(), 22))}</text>',
        f'<text class="detail" x="8" y="31">{escape(_short(node.name, 24))}</text>',
    ]
    if stats is not None:
        parts.append(f'<text class="detail" x="8" y="46">{stats.tokens_out or stats.tokens_in:,} tokens</text>')
        x, scale = 8.0, (BOX - 16) / max(1, cycles)
        for css, count in zip(
            ("busy", "input", "room", "memory"),
            (stats.busy, stats.wait_input, stats.wait_room, stats.wait_memory),
            strict=True,
        ):
            parts.append(f'<rect class="{css}" x="{x:.1f}" y="52" width="{count * scale:.1f}" height="7"/>')
            x += count * scale
    return "".join([*parts, "</g>"])


def _title(node: Node, stats: NodeStats | None) -> str:
    lines = [f"{node.name}: {node.kind}", *(f"{k}={v}" for k, v in node.attrs)]
    if node.source:
        lines.append(node.source)
    if stats is not None:
        lines += [
            f"tokens in {stats.tokens_in:,}, out {stats.tokens_out:,}",
            f"cycles {stats.start_cycle:,} to {stats.end_cycle:,}, busy {stats.busy:,}",
            f"waits: input {stats.wait_input:,}, room {stats.wait_room:,}, memory {stats.wait_memory:,}",
            f"flops {stats.flops:,}, read {stats.bytes_read:,} B, written {stats.bytes_written:,} B",
        ]
    return "\n".join(lines)


def _key(height: float) -> str:
    parts = []
    for index, (css, words) in enumerate(KEY):
        x = PAD + 130 * index
        parts.append(f'<rect class="{css}" x="{x}" y="{height - 20:.0f}" width="12" height="9"/>')
        parts.append(f'<text class="detail" x="{x + 17}" y="{height - 11:.0f}">{words}</text>')
    return "".join(parts)


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 1] + "…"
