"""What a sparse run did, for people: tables, a page with drawings, and a timeline that Perfetto opens."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from tilestream import files
from tilestream.sparse import drawing
from tilestream.sparse.stream.graph import Graph
from tilestream.sparse.stream.result import NodeStats, Result

BUCKETS = 256


def node_table(result: Result, most: int = 0) -> Table:
    """A row a node: tokens, cycles, what it waited for, FLOPs, bytes. ``most`` > 0: only the busiest."""
    made = Table(box=None, pad_edge=False)
    made.add_column("node", overflow="fold")
    made.add_column("kind")
    for column in ("tokens", "busy", "for input", "for room", "for memory", "flops", "bytes"):
        made.add_column(column, justify="right")
    nodes = [n for n in result.nodes if n.kind != "broadcast"]
    if most:
        nodes = sorted(nodes, key=lambda n: -n.busy)[:most]
    for n in nodes:
        counts = (n.tokens_out or n.tokens_in, n.busy, n.wait_input, n.wait_room, n.wait_memory, n.flops)
        made.add_row(n.name, n.kind, *(f"{c:,}" for c in counts), f"{n.bytes_read + n.bytes_written:,}")
    return made


def bottleneck(result: Result) -> NodeStats | None:
    """The node that was busy longest; None for a graph without nodes that take time."""
    return max(result.nodes, key=lambda n: n.busy, default=None)


def node_json(node: NodeStats) -> dict[str, Any]:
    return {name: getattr(node, name) for name in NodeStats.__dataclass_fields__}


def result_json(result: Result) -> dict[str, Any]:
    """``cycles``, ``flops``, ``bytes`` and ``nodes`` of one region."""
    nodes = [node_json(n) for n in result.nodes]
    return {"cycles": result.cycles, "flops": result.flops, "bytes": result.bytes, "nodes": nodes}


def trace(runs: Mapping[str, Result]) -> dict[str, Any]:
    """A Chrome trace: a process a region, a thread a node; one cycle is shown as one microsecond.

    Regions follow each other, since one begins when what it reads is complete. A node's slice is divided by its
    shares of busy and waiting cycles; where a run was traced, counters show when its tokens came.
    """
    events: list[dict[str, Any]] = []
    start = 0
    for pid, (title, result) in enumerate(runs.items(), start=1):
        name = f"{title}: {result.cycles:,} cycles"
        events.append({"ph": "M", "name": "process_name", "pid": pid, "args": {"name": name}})
        for tid, node in enumerate(result.nodes, start=1):
            if node.kind == "broadcast":
                continue
            label = {"name": f"{node.name} ({node.kind})"}
            events.append({"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": label})
            events.append(_slice(node, pid, tid, start))
        events += _counters(result, pid, start)
        start += result.cycles
    return {"traceEvents": events, "displayTimeUnit": "ms", "otherData": {"unit": "1 us is 1 cycle"}}


def write_timeline(path: Path, runs: Mapping[str, Result]) -> Path:
    return files.write(path, json.dumps(trace(runs), separators=(",", ":")))


def _slice(node: NodeStats, pid: int, tid: int, start: int) -> dict[str, Any]:
    waits = {"wait_input": node.wait_input, "wait_room": node.wait_room, "wait_memory": node.wait_memory}
    length = max(0, node.end_cycle - node.start_cycle)
    args = {"busy": node.busy, **waits, "tokens_in": node.tokens_in, "tokens_out": node.tokens_out}
    busy = node.busy / length if length else 0.0
    return {
        "ph": "X",
        "cat": "node",
        "name": f"{node.kind}: busy {min(1.0, busy):.0%}",
        "pid": pid,
        "tid": tid,
        "ts": start + node.start_cycle,
        "dur": length,
        "args": args,
    }


def _counters(result: Result, pid: int, start: int) -> list[dict[str, Any]]:
    """Tokens a bucket of cycles of every traced stream."""
    events = []
    width = max(1, -(-max(1, result.cycles) // BUCKETS))
    for port, stream in result.streams.items():
        counts = np.bincount(np.asarray(stream.times) // width) if len(stream) else np.zeros(1, dtype=np.int64)
        name = f"tokens {port}"
        for bucket, count in enumerate([*counts.tolist(), 0]):
            at = start + bucket * width
            events.append({"ph": "C", "name": name, "pid": pid, "ts": at, "args": {"tokens": count}})
    return events


def page(title: str, regions: Sequence[tuple[str, Graph, Result | None, str]], head: str = "") -> str:
    """A self-contained HTML page: of every region its name, graph, run and text (its fusion table)."""
    parts = [
        '<!doctype html><html lang="en"><meta charset="utf-8">',
        f"<title>{escape(title)}</title><style>{_STYLE}</style><h1>{escape(title)}</h1>",
    ]
    if head:
        parts.append(f"<pre>{escape(head)}</pre>")
    for name, graph, result, words in regions:
        parts.append(f"<h2>{escape(name)}</h2>")
        if result is not None:
            line = f"{result.cycles:,} cycles, {result.flops:,} operations, {result.bytes:,} bytes"
            most = bottleneck(result)
            line += f"; busiest: {most.name} ({most.kind}), {most.busy:,} cycles" if most else ""
            parts.append(f"<p>{escape(line)}</p>")
        if words:
            parts.append(f"<pre>{escape(words)}</pre>")
        parts.append(f'<div class="scroll">{drawing.svg(graph, result)}</div>')
        if result is not None:
            parts.append(_html_table(result))
    return "".join([*parts, "</html>"])


_STYLE = (
    "body{font:14px ui-sans-serif,system-ui,sans-serif;margin:24px;max-width:1200px;color:#1c2430}"
    "table{border-collapse:collapse}td,th{padding:2px 10px;text-align:right;border-bottom:1px solid #e3e6eb}"
    "td:first-child,th:first-child,td:nth-child(2){text-align:left}.scroll{overflow:auto;border:1px solid #e3e6eb}"
    "pre{background:#f6f7f9;padding:10px;overflow:auto}"
)


def _html_table(result: Result) -> str:
    head = "node,kind,tokens,busy,waits for input,for room,for memory,flops,bytes".split(",")
    rows = ["<tr>" + "".join(f"<th>{h}</th>" for h in head) + "</tr>"]
    for n in result.nodes:
        if n.kind == "broadcast":
            continue
        counts = (n.tokens_out or n.tokens_in, n.busy, n.wait_input, n.wait_room, n.wait_memory, n.flops)
        cells = [escape(n.name), n.kind, *(f"{c:,}" for c in counts), f"{n.bytes_read + n.bytes_written:,}"]
        rows.append("<tr>" + "".join(f"<td>{c}</td>" for c in cells) + "</tr>")
    return f"<table>{''.join(rows)}</table>"
