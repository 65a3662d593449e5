"""Run a stream graph by its specification: one Python object a token. Slow, and what the engine is tested against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tilestream.errors import SparseError, StreamDeadlock
from tilestream.sparse.spec import MEANING, Channel, Clock, Token
from tilestream.sparse.storage import Format, SparseTensor
from tilestream.sparse.stream.assemble import assemble
from tilestream.sparse.stream.graph import Graph, Node, Port, StreamType
from tilestream.sparse.stream.operands import check_operands
from tilestream.sparse.stream.result import Result, Stream
from tilestream.sparse.stream.types import stream_types
from tilestream.sparse.timing import COMAL, Timing


def run(
    graph: Graph,
    tensors: Mapping[str, SparseTensor],
    *,
    timing: Timing = COMAL,
    depth: int | None = None,
    shapes: Mapping[str, tuple[tuple[int, ...], Format]],
    trace: bool = False,
) -> Result:
    """Values, cycles and counts of a graph.

    Args:
        tensors: by the names that the graph's nodes give.
        depth: slots of every channel; None for no bound.
        shapes: (logical shape, format) of each result.
        trace: keep every stream, in ``Result.streams``.

    Raises:
        SparseError: a tensor or shape that is missing, or streams of different structure that meet.
        StreamDeadlock: channels of this depth filled up; names the cycle of nodes that wait for each other.
    """
    if depth is not None and depth < 1:
        raise SparseError(f"channels of depth {depth}", "use 1 or more, or None for no bound")
    check_operands(graph, tensors, shapes)
    channels: dict[Port, Channel] = {}
    for stream, readers in graph.consumers().items():
        channels[stream] = Channel(stream.node, readers[0][0].name, depth, trace)
    clocks = [_clock(graph, node, channels, tensors, timing) for node in graph.nodes]
    _go(graph, clocks)
    nodes = tuple(clock.stats() for clock in clocks)
    types = stream_types(graph)
    return Result(
        outputs={name: _result(name, clocks, *shapes[name]) for name in graph.results()},
        cycles=max((x.end_cycle for x in nodes), default=0),
        nodes=nodes,
        flops=sum(x.flops for x in nodes),
        bytes=sum(x.bytes_read + x.bytes_written for x in nodes),
        streams={port: _stream(c, types[port]) for port, c in channels.items()} if trace else {},
    )


def run_node(
    node: Node, ins: Mapping[str, Sequence[tuple[int, Any]]], tensor: SparseTensor | None = None, block: int = 1
) -> dict[str, list[tuple[int, Any]]]:
    """The (tag, value) tokens that one node puts out, by port, for the tokens that it is given."""
    given = {port: Channel("", node.name) for port in ins}
    for port, tokens in ins.items():
        given[port].tokens.extend(Token(tag, value, 0) for tag, value in tokens)
    made = {port: Channel(node.name, "", trace=True) for port in node.outs}
    clock = Clock(node, given, made, tensor, COMAL, block)
    for _ in MEANING[node.kind](clock):
        raise clock.wrong("its input ends before done")
    return {port: [(t.tag, t.value) for t in channel.trace or ()] for port, channel in made.items()}


def _clock(
    graph: Graph, node: Node, channels: Mapping[Port, Channel], tensors: Mapping[str, SparseTensor], timing: Timing
) -> Clock:
    tensor = tensors.get(str(node.attr("tensor"))) if node.kind in ("scan", "locate", "array") else None
    ins = {port: channels[stream] for port, stream in node.ins}
    outs = {port: channels.get(Port(node.name, port)) for port in node.outs}
    return Clock(node, ins, outs, tensor, timing, graph.block)


def _go(graph: Graph, clocks: list[Clock]) -> None:
    """Let every node go as far as it can, in turn, until all are done."""
    waiting = {clock.node.name: (clock, MEANING[clock.node.kind](clock)) for clock in clocks}
    while waiting:
        moved = False
        for name, (clock, steps) in list(waiting.items()):
            before = _progress(clock)
            if next(steps, True):
                del waiting[name]
                moved = True
            moved |= _progress(clock) != before
        if not moved:
            raise StreamDeadlock(_cycle(graph, {n: c for n, (c, _) in waiting.items()}), "use deeper channels")


def _progress(clock: Clock) -> int:
    return sum(c.take_count for c in clock.ins.values()) + sum(c.put_count for c in clock.outs.values() if c)


def _cycle(graph: Graph, waiting: Mapping[str, Clock]) -> str:
    """Which nodes wait for each other, and for what."""
    path: list[str] = []
    name = next(iter(waiting))
    steps: dict[str, str] = {}
    while name in waiting and name not in path:
        path.append(name)
        blocked = waiting[name].blocked
        if blocked is None:
            break
        why, channel = blocked
        other = channel.writer if why == "input" else channel.reader
        steps[name] = f"{name} waits for {'a token from' if why == 'input' else 'room towards'} {other}"
        name = other
    cycle = path[path.index(name) :] if name in path else path
    depth = next((c.depth for x in waiting.values() for c in x.ins.values()), None)
    return f"graph {graph.name!r} cannot go on with channels of depth {depth}: " + "; ".join(
        steps.get(x, f"{x} has ended") for x in cycle
    )


def _result(name: str, clocks: Sequence[Clock], shape: tuple[int, ...], format: Format) -> SparseTensor:
    writers = [c for c in clocks if c.node.kind in ("write_crd", "write_val") and c.node.attr("tensor") == name]
    levels = sorted((c for c in writers if c.node.kind == "write_crd"), key=lambda c: int(c.node.attr("level") or 0))
    values = next(c.values for c in writers if c.node.kind == "write_val")
    empty = np.zeros((0, format.block, format.block) if format.block > 1 else 0)
    kept = np.array(values, dtype=np.float64) if values else empty
    skips = any(c.node.attr("skip_empty") for c in levels)
    return assemble(name, shape, format, [np.array(c.words, dtype=np.int64) for c in levels], kept, skips)


def _stream(channel: Channel, type: StreamType) -> Stream:
    tokens = channel.trace or []
    return Stream(
        np.array([t.tag for t in tokens], dtype=np.int64),
        np.array([t.value for t in tokens], dtype=np.float64) if type is StreamType.VAL else None,
        np.array([t.time for t in tokens], dtype=np.int64),
    )
