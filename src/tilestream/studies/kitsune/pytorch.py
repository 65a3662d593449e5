"""A whole graph as eager PyTorch runs it, a kernel an operator. (As Inductor runs it: ``plan/whole.py``.)

The evaluation's ``bulk`` has a kernel an operator too, but reductions and lookups in it stream: PyTorch's own are far
from the memory's rate, and a study that is held against those would gain by their faults. What is here says how long
a model takes on a GPU that exists, and is held against one (docs/truth.md).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import prod

from tilestream.devices import Device
from tilestream.graph.costs.table import Eager, row
from tilestream.graph.nodes import packet
from tilestream.ir.pipeline import DTYPE_BYTES
from tilestream.simulator.library import Cache, Rows, eager, launch, with_cached
from tilestream.simulator.workload import SimLaunch, SimStage, Workload
from tilestream.studies.kitsune.compiler.operators import Kind, Operand, Operator, OperatorGraph
from tilestream.studies.kitsune.compiler.traffic import reads, writes
from tilestream.studies.kitsune.eager_gradients import norm_gradient, table_gradient
from tilestream.studies.kitsune.workloads import library_kernels


def workload(graph: OperatorGraph, device: Device) -> Workload:
    """All launches of ``graph``; values that the L2 still holds are not read from DRAM again."""
    launches: list[SimLaunch] = []
    cache = Cache(device)
    for op in graph:
        share = cache.share(reads(graph, (op.name,)).items(), writes(graph, (op.name,)).items())
        launches += [with_cached(made, share) for made in _eager(op, graph, device)]
    return Workload(f"{graph.name} eager", tuple(launches))


def _eager(op: Operator, graph: OperatorGraph, device: Device) -> tuple[SimLaunch, ...]:
    """The kernels of one operator: its own kind of PyTorch's, or one that streams."""
    stages = _own(op, graph, device)
    if not stages:
        return library_kernels((op.name,), graph, device)
    return tuple(launch(op.name, stage, device) for stage in stages)


def _own(op: Operator, graph: OperatorGraph, device: Device) -> list[SimStage]:
    """PyTorch's own kernels for an operator that has such (``graph.costs``); none for others."""
    kernel = row(packet(op.node)).eager
    read, written = sum(reads(graph, (op.name,)).values()), sum(writes(graph, (op.name,)).values())
    size = DTYPE_BYTES.get(graph.values[op.outputs[0]].dtype, 2)
    features = float(graph.values[op.outputs[0]].shape[-1]) if graph.values[op.outputs[0]].shape else 1.0

    def one(kind: str, over: Rows) -> SimStage:
        return replace(eager(kind, over, device, op.name), source=op.source)

    match kernel:
        case Eager.LAYER_NORM | Eager.SOFTMAX | Eager.SOFTMAX_GRADIENT:
            return [one(kernel, Rows(op.rows, features, read, written))]
        case Eager.NORM_GRADIENT:
            return norm_gradient(Rows(op.rows, features, read, written), device, op.name)
        case Eager.SUM if op.reduced > 1:
            results = max(1.0, max(prod(x.shape) for x in op.inputs) / op.reduced)
            if op.over_rows:
                return [one("sum_rows", Rows(op.reduced, results, read, written))]
            return [one("sum_features", Rows(results, op.reduced, read, written))]
        case Eager.SCATTER_ADD | Eager.SCATTER_ELEMENTS | Eager.SCATTER_REDUCE:
            added = max(op.inputs, key=lambda x: x.touched)
            width = float(added.shape[-1])
            kinds = ("scatter_fill", kernel) if kernel is Eager.SCATTER_REDUCE else (kernel,)
            return [one(kind, Rows(prod(added.shape) / width, width, read, written)) for kind in kinds]
        case Eager.TABLE_GRADIENT:
            return [stage for value in op.outputs for stage in _table_gradient(op, value, graph, device)]
        case Eager.INDEX_GRADIENT:
            return [one(kernel, Rows(written / size, 1.0, read, written))]
        case Eager.CAT if op.kind is Kind.GATHER:
            return [*_gathered(op, size, one), one(_cat(op.inputs), Rows(op.rows, features, written, written))]
        case Eager.CAT:
            return [one(_cat(op.inputs), Rows(op.rows, features, read, written))]
        case Eager.LOOKUP:  # one a table
            count = len(op.outputs)
            if features * size % 16:  # rows that no whole line holds are copied by element
                kernel = "lookup_elements"
            return [one(kernel, Rows(op.rows, features, read / count, written / count, written / count))] * count
    return []


def _table_gradient(op: Operator, value: str, graph: OperatorGraph, device: Device) -> list[SimStage]:
    entry = graph.values[value]
    given = max(op.inputs, key=lambda x: x.touched)
    itemsize = DTYPE_BYTES.get(entry.dtype, 2)
    rows, features = entry.shape[0], entry.shape[-1]
    return table_gradient(rows, prod(given.shape[:-1]), features, itemsize, device, op.name)


def _gathered(op: Operator, size: int, one: Callable[[str, Rows], SimStage]) -> list[SimStage]:
    """A lookup an operand of which rows are gathered, in front of their concatenation."""
    found = []
    for table in (x for x in op.inputs if x.touched > 0 and len(x.shape) > 1):
        width = float(table.shape[-1])
        if table.touched > table.bytes or table.shape[0] != op.rows:
            part = op.rows * width * size
            found.append(one(Eager.LOOKUP, Rows(op.rows, width, min(table.bytes, part), part, part)))
    return found


def _cat(operands: Sequence[Operand]) -> str:
    """Whether every part has rows that are multiples of 16 bytes."""
    return "cat odd" if any(x.shape and x.shape[-1] % 8 for x in operands if len(x.shape) > 1) else "cat"
