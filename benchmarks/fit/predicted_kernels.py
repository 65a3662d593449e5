"""What the simulator says a row of ``silicon.py`` takes: its kernels one after another, by the event engine."""

from __future__ import annotations

from typing import Any

import torch

from tilestream.devices import Device
from tilestream.graph.costs.elements import Each, each
from tilestream.ir.serialise import pipeline_from_json
from tilestream.simulator import run, simulate
from tilestream.simulator.library import (
    EAGER,
    Beside,
    Indexed,
    Product,
    Rows,
    eager,
    gemm,
    launch,
    stream,
)
from tilestream.simulator.workload import SimStage, Workload
from tilestream.studies.kitsune.eager_gradients import norm_gradient, table_gradient

RESIDENT, LOST = 0.6, 1.0
"""Shares of the L2 up to which operands all stay in it from call to call, and from which none does."""
GEMMS = ("linear", "matmul", "bmm")
SKIPPED = {"launch", "sdpa", "transpose"}
"""Kinds that the model has no kernel for: their time is set by latency, atomics or access patterns."""
DTYPE_BYTES = {"bf16": 2, "f16": 2, "f32": 4}


def held_in_l2(size: float, device: Device) -> float:
    """Share of operands of ``size`` bytes that repeated calls find in the L2."""
    return min(1.0, max(0.0, (LOST - size / device.l2_bytes) / (LOST - RESIDENT)))


def predict_us(row: dict[str, Any], device: Device) -> float:
    """The simulator's microseconds for a row of ``silicon.py``."""
    if row["kind"] == "pipeline":
        pipelines = [pipeline_from_json(p) for p in row["extra"]["pipelines"]]
        return sum(simulate(p, row["shape"]["rows"], device, spans=False).time_us for p in pipelines)
    cached = held_in_l2(row["bytes"], device) if row["state"] == "warm" else 0.0
    launches = tuple(launch(row["name"], stage, device) for stage in stages_of(row, cached, device))
    return run(Workload(row["name"], launches), device).time_s * 1e6


def stages_of(row: dict[str, Any], cached: float, device: Device) -> list[SimStage]:
    """The kernels of a row, one after another."""
    shape, kind, name = row["shape"], row["kind"], row["name"]
    if kind in GEMMS:
        return [gemm(name, product_of(row), device, Beside(cached=cached))]
    if kind == "indexed":
        return indexed(row, cached, device)
    if shape.get("op") == "embedding_backward":
        nodes, edges, features = shape["nodes"], shape["edges"], shape["features"]
        return table_gradient(nodes, edges, features, 2, device, name, cached=cached)
    if shape.get("op") == "layer_norm_backward":
        size = 2.0 * shape["rows"] * shape["features"]
        return norm_gradient(Rows(shape["rows"], shape["features"], 2 * size, size), device, name, cached=cached)
    found = rows_of(row)
    return [eager(*found, device, cached=cached) if found else streamed(row, cached, device)]


def streamed(row: dict[str, Any], cached: float, device: Device) -> SimStage:
    """A kernel that streams: elementwise, a copy, one of Inductor's."""
    kind, counts = row["kind"], _cost(str(row["shape"].get("op", row["kind"])))
    elements, read, written = _amounts(row)
    return stream(
        kind,
        elements,
        read,
        written,
        device,
        simt_ops=counts.lanes * elements,
        sfu_ops=counts.special * elements,
        cached=cached,
    )


def _cost(name: str) -> Each:
    """Instructions of an element of an ATen operator, or of what is none: one."""
    packet = getattr(torch.ops.aten, name.replace("relu_backward", "threshold_backward"), None)
    if packet is None:
        return Each(1.0, 0.0)
    graph = torch.fx.Graph()
    operator = packet.Tensor if "Tensor" in packet.overloads() else packet.default
    wanted = [a for a in operator._schema.arguments if str(a.type) == "Tensor"]
    given = [graph.placeholder(a.name) for a in wanted]
    node = graph.call_function(operator, tuple(given) + ((0,) if name == "relu_backward" else ()))
    for n in (*given, node):
        n.meta["val"] = torch.empty(1, dtype=torch.bfloat16, device="meta")
    return each(node)


def product_of(row: dict[str, Any]) -> Product:
    """The product of a GEMM's row; linears have a weight of [n, k]."""
    shape = row["shape"]
    layout = "nt" if row["kind"] == "linear" else shape.get("layout", "nn")
    return Product(shape.get("b", 1), shape["m"], shape["n"], shape["k"], "bf16", layout)


def rows_of(row: dict[str, Any]) -> tuple[str, Rows] | None:
    """Which of PyTorch's own kernels a row is, and what it goes over; None of one that streams."""
    shape, kind = row["shape"], row["kind"]
    features = float(shape.get("features", 0))
    if kind == "reduction" and shape["op"] in EAGER:
        size = 2.0 * shape["rows"] * features
        result = {"sum_rows": 2 * features, "sum_features": 2.0 * shape["rows"]}.get(shape["op"], size)
        reads = 2 if shape["op"].endswith("backward") else 1
        return shape["op"], Rows(shape["rows"], features, size * reads, result)
    if kind == "gather":
        size, edges = 2.0 * features, shape["edges"]
        how = "bag" if shape.get("op") == "bag" else "lookup"
        return how, Rows(edges, features, min(shape["nodes"], edges) * size + 8 * edges, edges * size, edges * size)
    if kind == "scatter" and shape.get("op") == "index_backward":
        elements = float(shape["edges"] * features)
        return "index_gradient", Rows(elements, 1.0, 10 * elements, 2 * elements)
    if kind == "scatter" and "op" not in shape:
        size, edges = (4.0 if shape.get("dtype") == "f32" else 2.0) * features, shape["edges"]
        return "scatter_add", Rows(edges, features, edges * (size + 8) + shape["nodes"] * size, shape["nodes"] * size)
    if kind == "cat":
        widths = [int(w) for w in str(shape.get("parts") or f"{shape['a']},{shape['b']}").split(",")]
        size = 2.0 * shape["rows"] * sum(widths)
        return "cat odd" if any(w % 8 for w in widths) else "cat", Rows(shape["rows"], sum(widths), size, size)
    return None


def _amounts(row: dict[str, Any]) -> tuple[float, float, float]:
    """Elements worked on, and bytes read and written."""
    shape, kind = row["shape"], row["kind"]
    if kind == "elementwise":
        n = shape["elements"]
        return n, 2.0 * n * shape["inputs"], 2.0 * n
    if kind in ("reduction", "compiled"):
        n = shape["rows"] * shape["features"]
        written = 2.0 * {"sum_rows compiled": shape["features"], "mean_features f32": 0}.get(shape["op"], n)
        return n, row["bytes"] - written, written
    n = row["bytes"] / 4
    return n, row["bytes"] / 2, row["bytes"] / 2


def indexed(row: dict[str, Any], cached: float, device: Device) -> list[SimStage]:
    """Of ``silicon_indexed.py``: zeros and the kernel that adds to them; a table's gradient is made in float32."""
    shape, name = row["shape"], row["name"]
    op, nodes, edges, features = shape["op"], shape["nodes"], shape["edges"], shape["features"]
    size = DTYPE_BYTES[shape["dtype"]]
    elements, number = float(edges * features), 8.0 * edges
    told = {"most": shape["most"]} if shape["receivers"] != "uniform" else {}
    table = Indexed(nodes, edges, features, size)
    if op in ("gather", "both ends"):
        ends = 1 if op == "gather" else 2
        read = Indexed(nodes, ends * edges, features, size)
        taken = read.distinct * read.row + ends * number
        return [stream(name, elements, taken, elements * size, device, cached=cached, by_index=(read,))]
    whole = float(nodes * features)
    if op.endswith("eager"):
        kinds = ("scatter_elements",) if op.startswith("scatter_add") else ("scatter_fill", "scatter_reduce")
        over = Rows(edges, features, elements * size + number, whole * size)
        own = [eager(kind, over, device, name, cached=cached) for kind in kinds]
        return [stream(name, whole, 0.0, whole * size, device, cached=cached), *own]
    table_gradient = op == "embedding_backward"
    summed = 4 if table_gradient else size
    added = Indexed(nodes, edges, features, summed, adds=True, **told)
    zeros = stream(name, whole, 0.0, whole * summed, device, cached=cached)
    if op in ("message", "weighted"):
        read, tables = (
            table.distinct * table.row + 2 * number + (size * edges if op == "weighted" else 0),
            (table, added),
        )
    else:
        read, tables = elements * size + number, (added,)
    sums = stream(name, elements, read, whole * summed, device, cached=cached, by_index=tables)
    if not table_gradient:
        return [zeros, sums]
    return [zeros, sums, stream(name, whole, 4 * whole, 2 * whole, device, cached=cached)]
