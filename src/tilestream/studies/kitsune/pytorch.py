"""A whole graph as PyTorch runs it: eager, a kernel an operator; or Inductor, which fuses what lies between products.

The evaluation's ``bulk`` has a kernel an operator too, but reductions and lookups in it stream: PyTorch's own are far
from the memory's rate, and a study that is held against those would gain by their faults. What is here says how long
a model takes on a GPU that exists, and is held against one (docs/truth.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tilestream.devices import Device
from tilestream.ir.pipeline import DTYPE_BYTES
from tilestream.simulator.library import Rows, eager, launch, norm_gradient, stream, table_gradient
from tilestream.simulator.workload import SimLaunch, SimStage, Workload
from tilestream.studies.kitsune.operators import Kind, Operand, Operator, OperatorGraph
from tilestream.studies.kitsune.pipeline import PRODUCTS
from tilestream.studies.kitsune.regions import convex, reads, schedule, writes
from tilestream.studies.kitsune.reuse import cached_shares, with_cached
from tilestream.studies.kitsune.workloads import library_kernels

ALONE = (*PRODUCTS, Kind.SCATTER)
"""What Inductor leaves to libraries and to PyTorch: products, and adding rows by an index in bf16."""
MOST_FUSED = 64
"""Operators of one of Inductor's kernels, its own limit."""
MOST_RESULTS = 4
"""An operator with more stands for many tables, each looked up by a kernel of its own."""


def workload(graph: OperatorGraph, device: Device, compiled: bool) -> Workload:
    """All launches of ``graph``; values that the L2 still holds are not read from DRAM again."""
    units = fused(graph) if compiled else [(op.name,) for op in graph]
    kernels: Callable[[Sequence[str]], tuple[SimLaunch, ...]]
    if compiled:
        kernels = lambda ops: _compiled(ops, graph, device)  # noqa: E731
    else:
        kernels = lambda ops: _eager(graph[ops[0]], graph, device)  # noqa: E731
    launches: list[SimLaunch] = []
    for ops, share in zip(units, cached_shares(graph, units, device), strict=True):
        launches += [with_cached(made, share) for made in kernels(ops)]
    return Workload(f"{graph.name} {'compiled' if compiled else 'eager'}", tuple(launches))


def fused(graph: OperatorGraph) -> list[tuple[str, ...]]:
    """Operators that Inductor makes one kernel of: neighbours between products, as long as they stay convex.

    A sum over rows is a kernel of its own: it goes over its operand the other way.
    """
    groups: list[list[str]] = []
    group_of: dict[str, list[str]] = {}
    for op in graph:
        if op.kind in ALONE or (op.kind is Kind.REDUCTION and op.over_rows) or len(op.outputs) > MOST_RESULTS:
            continue
        before = [group_of[p.name] for p in graph.predecessors(op) if p.name in group_of]
        for group in reversed(before):
            if len(group) < MOST_FUSED and convex(graph, [*group, op.name]):
                group.append(op.name)
                group_of[op.name] = group
                break
        else:
            group_of[op.name] = [op.name]
            groups.append(group_of[op.name])
    return schedule(graph, groups)


def _compiled(ops: Sequence[str], graph: OperatorGraph, device: Device) -> tuple[SimLaunch, ...]:
    if len(ops) == 1 and graph[ops[0]].kind in ALONE:
        return _eager(graph[ops[0]], graph, device, compiled=True)
    return library_kernels(ops, graph, device)


def _eager(op: Operator, graph: OperatorGraph, device: Device, compiled: bool = False) -> tuple[SimLaunch, ...]:
    """The kernels of one operator: its own kind of PyTorch's, or one that streams."""
    stages = _rows(op, graph, device, compiled)
    if not stages:
        return library_kernels((op.name,), graph, device)
    return tuple(launch(op.name, stage, device) for stage in stages)


def _rows(op: Operator, graph: OperatorGraph, device: Device, compiled: bool) -> list[SimStage]:
    """PyTorch's own kernels for an operator that reduces, looks up, scatters or concatenates; none for others.

    ``compiled``: Inductor adds gradients of tables and of indexed values with atomics, and does not sort.
    """
    read, written = sum(reads(graph, (op.name,)).values()), sum(writes(graph, (op.name,)).values())
    size = DTYPE_BYTES.get(graph.values[op.outputs[0]].dtype, 2)
    features = float(graph.values[op.outputs[0]].shape[-1]) if graph.values[op.outputs[0]].shape else 1.0
    widest = max((prod(x.shape) for x in op.inputs), default=0)

    def one(kind: str, over: Rows) -> SimStage:
        return eager(kind, over, device, op.name, ops=(op.name,), source=op.source)

    if op.label in ("layer_norm", "softmax", "softmax backward"):
        return [one(op.label.replace(" ", "_"), Rows(op.rows, features, read, written))]
    if op.label == "layer_norm backward":  # the gradient of its rows, then sums over them
        return norm_gradient(Rows(op.rows, features, read, written), device, op.name, ops=(op.name,))
    if op.kind is Kind.REDUCTION and op.reduced > 1:
        results = max(1.0, widest / op.reduced)
        if op.over_rows:
            return [one("sum_rows", Rows(op.reduced, results, read, written))]
        return [one("sum_features", Rows(results, op.reduced, read, written))]
    if op.kind is Kind.SCATTER and op.label == "scatter add":
        added = max(op.inputs, key=lambda x: x.touched)
        width = float(added.shape[-1])
        return [one("scatter_add", Rows(prod(added.shape) / width, width, read, written))]
    if op.label == "embedding backward":
        return [stage for value in op.outputs for stage in _table_gradient(op, value, graph, device, compiled)]
    if op.label == "index_put":
        return [one("scatter_add" if compiled else "index_gradient", Rows(written / size, 1.0, read, written))]
    if op.kind is Kind.CAT:
        return [one(_cat(op.inputs), Rows(op.rows, features, read, written))]
    if op.kind is Kind.GATHER:
        return _lookups(op, features, size, read, written, one)
    return []


def _table_gradient(op: Operator, value: str, graph: OperatorGraph, device: Device, compiled: bool) -> list[SimStage]:
    """PyTorch's own; Inductor's has atomics on a table of fp32, which is then converted."""
    entry = graph.values[value]
    given = max(op.inputs, key=lambda x: x.touched)
    itemsize = DTYPE_BYTES.get(entry.dtype, 2)
    rows, features = entry.shape[0], entry.shape[-1]
    looked_up = prod(given.shape[:-1])
    name, ops = op.name, (op.name,)
    if not compiled:
        return table_gradient(rows, looked_up, features, itemsize, device, name, ops=ops)
    whole, part = float(rows * features), float(looked_up * features)
    made = [
        stream(name, whole, 0.0, 4 * whole, device, ops=ops),
        eager("scatter_add", Rows(looked_up, features, part * itemsize, 4 * part), device, name, ops=ops),
    ]
    if itemsize < 4:
        made.append(stream(name, whole, 4 * whole, whole * itemsize, device, ops=ops))
    return made


def _lookups(
    op: Operator, features: float, size: int, read: float, written: float, one: Callable[[str, Rows], SimStage]
) -> list[SimStage]:
    """A lookup a table, or a lookup an operand and a concatenation of them."""
    tables = [x for x in op.inputs if x.touched > 0 and len(x.shape) > 1]
    if not op.label.startswith("gather-"):
        count = len(op.outputs)
        over = Rows(op.rows, features, read / count, written / count, written / count)
        return [one("lookup", over)] * count
    found = []
    for table in tables:
        width = float(table.shape[-1])
        if table.touched > table.bytes or table.shape[0] != op.rows:
            part = op.rows * width * size
            found.append(one("lookup", Rows(op.rows, width, min(table.bytes, part), part, part)))
    return [*found, one(_cat(op.inputs), Rows(op.rows, features, written, written))]


def _cat(operands: Sequence[Operand]) -> str:
    """Whether every part has rows that are multiples of 16 bytes."""
    return "cat odd" if any(x.shape and x.shape[-1] % 8 for x in operands if len(x.shape) > 1) else "cat"
