"""From a graph and its tensors to rows: channels, nodes, the queue. All that compiled code reads is kept here."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from tilestream.errors import SparseError
from tilestream.sparse.engine import layout as at
from tilestream.sparse.engine.kernels import KINDS
from tilestream.sparse.engine.kernels.arithmetic import BINARY_OPS, FOLD_OPS, UNARY_OPS
from tilestream.sparse.engine.machine import Machine
from tilestream.sparse.engine.scheduler import MEMORY_ROW, SIZE, SLOTS
from tilestream.sparse.engine.scheduler import NODES as ALL_NODES
from tilestream.sparse.engine.traffic import connect
from tilestream.sparse.memory import Memory
from tilestream.sparse.storage import SparseTensor
from tilestream.sparse.stream.graph import NODES, Graph, Node, Port, StreamType
from tilestream.sparse.stream.types import stream_types
from tilestream.sparse.timing import CONTROL_LATENCY, Timing

_RING = 1024
"""Slots of an unbounded channel at the start: few enough for a node's channels to lie in a second-level cache."""
_WAYS = 62
_SHALLOW = 8
"""Slots below which loops over tokens in a row do not pay."""

Depth = int | Mapping[str, int] | None
"""Slots of every stream's channel; or by ``str(Port)``, the rest being unbounded; or no bound."""


def build(
    graph: Graph,
    tensors: Mapping[str, SparseTensor],
    timing: Timing,
    memory: Memory,
    depth: Depth,
    trace: bool,
    with_values: bool,
) -> Machine:
    """Rows for a run.

    Raises:
        SparseError: a tensor that does not fit the graph, an unknown operation, a depth below 1 or of no stream, or no
            values where what is kept depends on them.
    """
    if not with_values and (drops := [node.name for node in graph.nodes if node.kind == "val_drop"]):
        raise SparseError(f"val_drop {drops[0]!r} keeps what is not 0, and there are no values", "run with values")
    readers = {port: found[0][0].name for port, found in graph.consumers().items()}
    ports = [p for node in graph.nodes for p in (Port(node.name, port) for port in node.outs) if p in readers]
    place = {node.name: i for i, node in enumerate(graph.nodes)}
    machine = Machine(
        graph,
        np.zeros((len(graph.nodes), at.NODE_CELLS), dtype=np.int64),
        np.zeros((max(1, len(ports)), at.CHANNEL_CELLS), dtype=np.int64),
        ports,
    )
    kinds, depths = stream_types(graph), _depths(depth, ports)
    machine.bounded = frozenset(i for i, port in enumerate(ports) if port in depths)
    for i, port in enumerate(ports):
        row = machine.channels[i]
        row[at.WIDTH] = graph.block**2 if kinds[port] is StreamType.VAL and with_values else 0
        machine.resize(i, depths.get(port) or max(8, _RING // max(1, int(row[at.WIDTH]))))
        row[at.RESPONSE] = timing.response_latency if port in depths else -1
        row[at.WRITER], row[at.READER] = machine.node_row(place[port.node]), machine.node_row(place[readers[port]])
        if trace:
            row[at.TRACE] = machine.store(f"trace {i}", (1, np.int64), (1, np.int64), (int(row[at.WIDTH]), np.float64))
    index = {port: i for i, port in enumerate(ports)}
    for i, node in enumerate(graph.nodes):
        _node(machine, i, node, index, timing, graph.block**2 if with_values else 0)
        _constants(machine, i, node, tensors, timing)
    machine.queue[SIZE], machine.queue[ALL_NODES] = len(graph.nodes), machine.node_row(0)
    machine.queue[SLOTS] = machine.keep("queue", np.zeros(len(graph.nodes), dtype=np.int64))
    if memory.kind != "none":
        machine.queue[MEMORY_ROW] = connect(machine, memory)
    return machine


def _depths(depth: Depth, ports: list[Port]) -> dict[Port, int]:
    if depth is None:
        return {}
    given = {str(port): depth for port in ports} if isinstance(depth, int) else dict(depth)
    by_name = {str(port): port for port in ports}
    if unknown := [name for name in given if name not in by_name]:
        raise SparseError(f"no stream is called {unknown[0]!r}", "name streams as node.port")
    if low := [name for name, slots in given.items() if slots < 1]:
        raise SparseError(f"a channel of depth {given[low[0]]}", "use 1 or more, or None for no bound")
    return {by_name[name]: slots for name, slots in given.items()}


def _inputs(node: Node) -> list[str]:
    """Names of its input ports, in the order in which its kernel numbers them."""
    given = [port for port, _ in node.ins]
    stems = {
        "spacc": ("val", "crd"),
        "intersect": ("crd", "in"),
        "union": ("crd", "in"),
        "join": ("in",),
    }.get(node.kind) or tuple(NODES[node.kind].ins)
    ordered = []
    for stem in stems:
        mine = [p for p in given if p == stem or (p.rstrip("0123456789") == stem and p not in stems)]
        ordered += sorted(mine, key=lambda p: int(p[len(stem) :] or 0))
    return ordered


def _node(machine: Machine, i: int, node: Node, index: Mapping[Port, int], timing: Timing, width: int) -> None:
    row, graph = machine.nodes[i], machine.graph
    kind = node.kind
    op = "unary" if node.attr("unary") else str(node.attr("op", ""))
    if kind == "spacc" and not node.attr("order"):
        kind = "reduce_by"
    if kind == "join":
        kind = "join_ordered" if node.attr("ordered") else "join_unordered"
    row[at.KIND] = KINDS.index(kind)
    interval, latency = timing.of("reduce" if kind == "reduce_by" else node.kind, op, graph.block)
    row[at.INTERVAL] = interval
    row[at.LATENCY] = max(latency, timing.channel_latency)
    row[at.CONTROL] = max(CONTROL_LATENCY, timing.channel_latency)
    row[at.START] = -1 if node.ins else 0
    row[at.NODE_WIDTH], row[at.VALUE_WORDS], row[at.NODE_INDEX] = width, graph.block**2, i
    outs = node.outs
    if node.kind == "spacc":
        outs = ("val", *outs[:-1])
    given = dict(node.ins)
    ins = [machine.channel_row(index[given[port]]) for port in _inputs(node)]
    out_rows = [machine.channel_row(index[p]) if (p := Port(node.name, port)) in index else 0 for port in outs]
    row[at.INS] = machine.keep(f"ins {i}", np.array([*ins, 0], dtype=np.int64))
    row[at.OUTS] = machine.keep(f"outs {i}", np.array([*out_rows, 0], dtype=np.int64))
    row[at.NINS], row[at.NOUTS] = len(ins), len(out_rows)
    slots = [int(machine.channels[machine.channel_at(x), at.CAPACITY]) for x in (*ins, *out_rows) if x]
    row[at.PLAIN] = all(out_rows) and min(slots) >= _SHALLOW
    actions = 3 * (len(ins) + len(out_rows)) + 8
    row[at.BOX] = machine.keep(f"box {i}", np.zeros((actions, at.ACTION_CELLS), dtype=np.int64))
    row[at.BOX_VALUES] = machine.keep(f"box values {i}", np.zeros((actions, width)))
    row[at.SCRATCH] = machine.keep(f"scratch {i}", np.zeros((2, width)))


def _constants(machine: Machine, i: int, node: Node, tensors: Mapping[str, SparseTensor], timing: Timing) -> None:
    row, kind = machine.nodes[i], node.kind
    if kind in ("scan", "locate"):
        _level(machine, i, node, tensors[str(node.attr("tensor"))])
    elif kind == "array":
        values = np.ascontiguousarray(tensors[str(node.attr("tensor"))].values, dtype=np.float64)
        row[at.B], row[at.D] = machine.keep(f"values {i}", values), len(values)
    elif kind == "alu":
        _operation(machine, i, node)
    elif kind in ("reduce", "spacc"):
        _fold(machine, i, node, timing)
    elif kind in ("fork", "join"):
        if kind == "fork" and node.attr("level"):
            raise SparseError(f"fork {node.name!r} deals elements, and cannot deal the fibers of a deeper level", "")
        level = node.attr("level")
        row[at.A] = 1 if level is None else int(level)
        row[at.C] = machine.keep(f"flags {i}", np.zeros(len(node.ins) + 1, dtype=np.int64))
    elif kind in ("intersect", "union"):
        if len(node.ins) > 2 * _WAYS:
            raise SparseError(f"{kind} {node.name!r} has more than {_WAYS} operands", "merge them in steps")
    elif kind == "write_crd":
        row[at.STORE] = machine.store(f"store {i}", (1, np.int64))
    elif kind == "write_val":
        row[at.STORE] = machine.store(f"store {i}", (int(row[at.NODE_WIDTH]), np.float64))


def _level(machine: Machine, i: int, node: Node, tensor: SparseTensor) -> None:
    """Of a node that reads a level of a tensor."""
    row, depth = machine.nodes[i], int(node.attr("level") or 0)
    if not 0 <= depth < len(tensor.levels):
        raise SparseError(
            f"node {node.name!r} reads level {depth} of tensor {tensor.name!r}, which has {len(tensor.levels)}",
            "use one of its levels",
        )
    level = tensor.levels[depth]
    row[at.D] = level.size
    if level.seg is not None and level.crd is not None:
        if node.kind == "locate":
            raise SparseError(f"locate {node.name!r} works on a dense level, and this one is compressed", "scan it")
        row[at.A] = 1
        row[at.B] = machine.keep(f"seg {i}", np.ascontiguousarray(level.seg, dtype=np.int64))
        row[at.C] = machine.keep(f"crd {i}", np.ascontiguousarray(level.crd, dtype=np.int64))
        row[at.G] = len(level.seg) - 1


def _operation(machine: Machine, i: int, node: Node) -> None:
    """Of a node that computes value by value."""
    row, block = machine.nodes[i], machine.graph.block
    unary = bool(node.attr("unary"))
    table = UNARY_OPS if unary else BINARY_OPS
    op = str(node.attr("op"))
    if op not in table:
        raise SparseError(f"node {node.name!r} has operation {op!r}", f"use one of: {', '.join(table)}")
    row[at.A] = list(table).index(op)
    row[at.B] = machine.keep(f"scalar {i}", np.array([float(node.attr("scalar") or 0.0)]))
    row[at.C] = block if row[at.NODE_WIDTH] else 0
    row[at.D] = 2 * block**3 if op in ("matmul", "matmul_t") and block > 1 else block**2
    row[at.G] = unary


def _fold(machine: Machine, i: int, node: Node, timing: Timing) -> None:
    """Of a reduction or an accumulator."""
    row, op = machine.nodes[i], str(node.attr("op") or "add")
    if op not in FOLD_OPS:
        raise SparseError(f"node {node.name!r} reduces by {op!r}", f"use one of: {', '.join(FOLD_OPS)}")
    row[at.A] = FOLD_OPS.index(op)
    order = int(node.attr("order") or 0)
    # Of a reduction, the cycles from a sum to the stop after it; of an accumulator, those of an outer fiber's end.
    costs = timing.style == ("comal" if order else "sam")
    row[at.C] = row[at.INTERVAL] if costs else 0
    if node.kind == "spacc" and order != len(node.ins) - 2:
        raise SparseError(
            f"spacc {node.name!r} of order {order} takes {order + 1} coordinate streams, not {len(node.ins) - 1}",
            "join one stream a level",
        )
    if node.kind == "spacc" and order:
        row[at.D], row[at.B] = order, 62 // order
        row[at.V] = machine.keep(f"paths {i}", np.zeros(order + 2, dtype=np.int64))
        machine.grow_table(i)
