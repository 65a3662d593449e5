"""Run a stream graph: build its rows, let the compiled loop go, give it room where it asks, and collect."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from tilestream.errors import SparseError
from tilestream.sparse.engine import layout as at
from tilestream.sparse.engine.build import Depth, build
from tilestream.sparse.engine.compiled import go, settle
from tilestream.sparse.engine.deadlock import deadlock
from tilestream.sparse.engine.kernels.levels import OUTSIDE
from tilestream.sparse.engine.kernels.parallel import UNEVEN
from tilestream.sparse.engine.machine import Machine
from tilestream.sparse.engine.scheduler import NEEDS_ROOM, NEEDS_STORE, NEEDS_TRACE, PAUSED
from tilestream.sparse.engine.traffic import moved
from tilestream.sparse.memory import NO_MEMORY, Memory
from tilestream.sparse.storage import Format, SparseTensor
from tilestream.sparse.stream.assemble import assemble
from tilestream.sparse.stream.graph import Graph
from tilestream.sparse.stream.operands import check_operands
from tilestream.sparse.stream.result import NodeStats, Result, Stream
from tilestream.sparse.stream.tokens import show
from tilestream.sparse.timing import COMAL, Timing

_CALLS = 100_000
"""Nodes called before compiled code returns, so that a run can be interrupted."""
_WORD = 4
_TELL_S = 2.0
_MOST_BYTES = 6 << 30
"""Of all channels' rings."""


def run(
    graph: Graph,
    tensors: Mapping[str, SparseTensor],
    *,
    timing: Timing = COMAL,
    memory: Memory = NO_MEMORY,
    depth: Depth = None,
    shapes: Mapping[str, tuple[tuple[int, ...], Format]],
    trace: bool = False,
    values: bool = True,
    progress: Callable[[str], None] | None = None,
) -> Result:
    """Values, cycles and counts of a graph.

    Args:
        tensors: by the names that the graph's nodes give.
        timing: what a step of each node costs.
        memory: what reading and writing tensors costs.
        depth: slots of every channel, or by stream (``str(Port)``) with no bound on the others; None: no bound.
        shapes: (logical shape, format) of each result.
        trace: keep every stream, in ``Result.streams``.
        values: False: times, counts and structures only, since they do not depend on values; results then hold zeros.
            Saves most of the work of graphs of blocks.
        progress: called with a line every few seconds.

    Raises:
        SparseError: a tensor or shape that is missing or does not fit, or streams of different structure that meet.
        StreamDeadlock: channels of this depth filled up; names the cycle of nodes that wait for each other.
    """
    check_operands(graph, tensors, shapes)
    machine = build(graph, tensors, timing, memory, depth, trace, values)
    _finish(machine, progress)
    nodes = tuple(_stats(machine, i) for i in range(len(graph.nodes)))
    return Result(
        outputs={name: _result(machine, name, *shapes[name]) for name in graph.results()},
        cycles=max((x.end_cycle for x in nodes), default=0),
        nodes=nodes,
        flops=sum(x.flops for x in nodes),
        bytes=sum(x.bytes_read + x.bytes_written for x in nodes),
        streams={port: _stream(machine, i) for i, port in enumerate(machine.ports)} if trace else {},
        memory=moved(machine, memory),
    )


def _finish(machine: Machine, progress: Callable[[str], None] | None) -> None:
    queue, told = machine.queue.ctypes.data, time.monotonic()
    for i in range(len(machine.nodes)):
        machine.push(i)
    while True:
        why, node = go(queue, _CALLS)
        waiting = machine.nodes[:, at.WAITING]
        if (waiting == at.FAILED).any():
            raise _failure(machine, int(np.flatnonzero(waiting == at.FAILED)[0]))
        if why == PAUSED:
            if progress and time.monotonic() > told + _TELL_S:
                told = time.monotonic()
                tokens, cycle = int(machine.channels[:, at.HEAD].sum()), int(machine.nodes[:, at.CLOCK].max())
                progress(f"{machine.graph.name}: cycle {cycle:,}, {tokens:,} tokens")
            continue
        if why in (NEEDS_STORE, NEEDS_TRACE):
            _serve(machine, queue, node)
        elif why == NEEDS_ROOM:
            _grow(machine, [machine.node_at(node)])
        elif (waiting == at.FINISHED).all():
            return
        elif not _grow(machine, np.flatnonzero(waiting == at.ON_ROOM)):
            raise deadlock(machine)


def _serve(machine: Machine, queue: int, row: int) -> None:
    """Give a node that stopped the room that it needs: in its store or table, and in the traces of its outputs."""
    index = machine.node_at(row)
    node = machine.nodes[index]
    for channel in machine.kept[f"outs {index}"][:-1]:
        if channel:
            i = machine.channel_at(int(channel))
            if machine.channels[i, at.TRACE]:
                used = int(machine.kept[f"trace {i}"][at.USED])
                machine.grow_store(f"trace {i}", used + int(machine.channels[i, at.CAPACITY]))
    settle(queue, row)
    if node[at.WAITING] == at.ON_STORE:
        if node[at.STORE]:
            machine.grow_store(f"store {index}")
        else:
            machine.grow_table(index)
        machine.push(index)


def _grow(machine: Machine, nodes: Sequence[int] | np.ndarray) -> bool:
    """Double the smallest channel without a bound that one of the nodes waits for; False if there is none."""
    channels = {machine.channel_at(int(machine.nodes[i, at.WAIT_CHANNEL])) for i in nodes} - machine.bounded
    if not channels:
        return False
    least = min(channels, key=lambda i: int(machine.channels[i, at.CAPACITY]))
    slots = 2 * int(machine.channels[least, at.CAPACITY])
    held = 8 * int(((2 + machine.channels[:, at.WIDTH]) * machine.channels[:, at.CAPACITY]).sum())
    if held > _MOST_BYTES:
        raise SparseError(
            f"the streams of graph {machine.graph.name!r} have to hold {held / 2**30:.1f} GiB; "
            f"{machine.ports[least]} now wants {slots:,} tokens",
            "use another order, or materialise what is read again; depth= bounds channels",
        )
    machine.resize(least, slots)
    machine.push(machine.node_at(int(machine.channels[least, at.WRITER])))
    return True


def _failure(machine: Machine, index: int) -> SparseError:
    row, node = machine.nodes[index], machine.graph.nodes[index]
    code, first, second = (int(row[cell]) for cell in (at.A, at.B, at.C))
    where = f"{node.kind} {node.name!r}" + (f" ({node.source})" if node.source else "")
    if code == OUTSIDE:
        what = f"coordinate or reference {first}, of {second}"
    elif code == UNEVEN:
        what = "the ways end in different parent fibers"
    else:
        what = f"tokens {show(first)} and {show(second)} met"
    return SparseError(f"{where}: {what}", "its input streams have to have one structure; check what feeds it")


def _stats(machine: Machine, index: int) -> NodeStats:
    row, node = machine.nodes[index], machine.graph.nodes[index]
    channels = machine.channels
    ins = [machine.channel_at(int(x)) for x in machine.kept[f"ins {index}"][:-1]]
    outs = [machine.channel_at(int(x)) for x in machine.kept[f"outs {index}"][:-1] if x]
    clock, busy, room, memory = (int(row[cell]) for cell in (at.CLOCK, at.BUSY, at.ROOM, at.MEMORY))
    return NodeStats(
        name=node.name,
        kind=node.kind,
        tokens_in=int(channels[ins, at.HEAD].sum()),
        tokens_out=int(channels[outs, at.TAIL].sum()),
        start_cycle=max(0, int(row[at.START])),
        end_cycle=clock,
        busy=busy,
        wait_input=clock - busy - room - memory,
        wait_room=room,
        wait_memory=memory,
        flops=int(row[at.FLOPS]),
        bytes_read=_WORD * int(row[at.READ]),
        bytes_written=_WORD * int(row[at.WRITTEN]),
    )


def _result(machine: Machine, name: str, shape: tuple[int, ...], format: Format) -> SparseTensor:
    mine = [(i, n) for i, n in enumerate(machine.graph.nodes) if n.attr("tensor") == name]
    levels = sorted((int(n.attr("level") or 0), i) for i, n in mine if n.kind == "write_crd")
    values, block = machine.stored(f"store {next(i for i, n in mine if n.kind == 'write_val')}"), machine.graph.block
    if values.shape[1] == 0:
        values = np.zeros((len(values), block**2))
    shaped = values.reshape(-1, block, block) if block > 1 else values[:, 0]
    crds = [machine.stored(f"store {i}")[:, 0] for _, i in levels]
    skips = any(n.attr("skip_empty") for _, n in mine)
    return assemble(name, shape, format, crds, shaped, skips)


def _stream(machine: Machine, index: int) -> Stream:
    tags, times, values = (machine.stored(f"trace {index}", column) for column in range(3))
    block = machine.graph.block
    carried = None
    if machine.channels[index, at.WIDTH]:
        carried = np.where(tags < 0, 0.0, values)
        carried = carried.reshape(-1, block, block) if block > 1 else carried[:, 0]
    return Stream(tags[:, 0].copy(), carried, times[:, 0].copy())
