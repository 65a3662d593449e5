"""A whole graph as eager PyTorch runs it, a kernel an operator. (As Inductor runs it: ``plan/whole.py``.)

The evaluation's ``bulk`` has a kernel an operator too, but reductions and lookups in it stream: PyTorch's own are far
from the memory's rate, and a study that is held against those would gain by their faults. What is here says how long
a model takes on a GPU that exists, and is held against one (docs/truth.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod

from tilestream.devices import Device
from tilestream.ir.pipeline import DTYPE_BYTES
from tilestream.plan.spatial.operators import Kind, Operand, Operator, OperatorGraph
from tilestream.plan.spatial.traffic import reads, writes
from tilestream.simulator.library import Rows, eager, launch, norm_gradient, table_gradient
from tilestream.simulator.workload import SimLaunch, SimStage, Workload
from tilestream.studies.kitsune.reuse import cached_shares, with_cached
from tilestream.studies.kitsune.workloads import library_kernels


def workload(graph: OperatorGraph, device: Device) -> Workload:
    """All launches of ``graph``; values that the L2 still holds are not read from DRAM again."""
    launches: list[SimLaunch] = []
    shares = cached_shares(graph, [(op.name,) for op in graph], device)
    for op, share in zip(graph, shares, strict=True):
        launches += [with_cached(made, share) for made in _eager(op, graph, device)]
    return Workload(f"{graph.name} eager", tuple(launches))


def _eager(op: Operator, graph: OperatorGraph, device: Device) -> tuple[SimLaunch, ...]:
    """The kernels of one operator: its own kind of PyTorch's, or one that streams."""
    stages = _rows(op, graph, device)
    if not stages:
        return library_kernels((op.name,), graph, device)
    return tuple(launch(op.name, stage, device) for stage in stages)


def _rows(op: Operator, graph: OperatorGraph, device: Device) -> list[SimStage]:
    """PyTorch's own kernels for an operator that reduces, looks up, scatters or concatenates; none for others."""
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
        return [stage for value in op.outputs for stage in _table_gradient(op, value, graph, device)]
    if op.label == "index_put":
        return [one("index_gradient", Rows(written / size, 1.0, read, written))]
    if op.kind is Kind.CAT:
        return [one(_cat(op.inputs), Rows(op.rows, features, read, written))]
    if op.kind is Kind.GATHER:
        return _lookups(op, features, size, read, written, one)
    return []


def _table_gradient(op: Operator, value: str, graph: OperatorGraph, device: Device) -> list[SimStage]:
    entry = graph.values[value]
    given = max(op.inputs, key=lambda x: x.touched)
    itemsize = DTYPE_BYTES.get(entry.dtype, 2)
    rows, features = entry.shape[0], entry.shape[-1]
    return table_gradient(rows, prod(given.shape[:-1]), features, itemsize, device, op.name, ops=(op.name,))


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
