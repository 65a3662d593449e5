"""From designs to what the simulator runs: every launch of a bulk, vertical or spatial execution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from tilestream.devices import Device
from tilestream.plan.spatial.operators import PRODUCTS, Kind, Operator, OperatorGraph
from tilestream.plan.spatial.tiling import elements
from tilestream.plan.spatial.traffic import reads, writes
from tilestream.simulator.library import Beside, Product, gemm, launch, merge, stream
from tilestream.simulator.library.streams import CTAS_PER_SM, REGISTERS
from tilestream.simulator.workload import Engine, SimLaunch, SimStage, TileWork


def library_kernels(ops: Sequence[str], graph: OperatorGraph, device: Device) -> tuple[SimLaunch, ...]:
    """Operators as a library runs them: one kernel, or one a table where a counted operator stands for many tables."""
    op = graph[ops[0]]
    tables = len(op.outputs)
    made = one_kernel(ops, graph, device)
    if len(ops) > 1 or tables == 1 or op.kind not in (Kind.GATHER, Kind.SCATTER):
        return (made,)
    (stage,) = made.stages
    tiles = ceil(stage.tiles / tables)
    share = replace(
        stage, tiles=tiles, ctas=min(stage.ctas, tiles), work=stage.work.scaled(stage.tiles / tables / tiles)
    )
    return tuple(replace(made, name=f"{made.name}.{i}", stages=(share,)) for i in range(tables))


def one_kernel(ops: Sequence[str], graph: OperatorGraph, device: Device) -> SimLaunch:
    """Operators as one kernel of one stage: a bulk operator, or a vertically fused group.

    Several products of a group run one after another in the same CTAs; the first one's tiles are the group's.
    """
    members = [graph[name] for name in ops]
    read, written = sum(reads(graph, ops).values()), sum(writes(graph, ops).values())
    simt = sum(op.simt_ops for op in members)
    sfu = sum(op.sfu_ops for op in members)
    head = next((op for op in members if op.kind in PRODUCTS), members[0])
    common = {"ops": tuple(ops), "source": head.source}
    if head.gemm is not None:
        more = sum(op.flops for op in members) - head.flops
        after = sum(op.kind in PRODUCTS for op in members) - 1 if more else 0
        beside = Beside(simt, sfu, read, written, more_flops=more, more_products=after)
        stage = gemm(head.name, product_of(head), device, beside, **common)
    elif head.kind in PRODUCTS:
        stage = _attention(head, read, written, device, common["ops"])
    else:
        touched = sum(operand.touched for operand in head.inputs) if len(members) == 1 else read
        stage = stream(
            head.name,
            max(elements(op, graph) for op in members),
            read,
            written,
            device,
            touched=touched,
            simt_ops=simt,
            sfu_ops=sfu,
            **common,
        )
    return launch(ops[0] if len(ops) == 1 else f"{ops[0]}..{ops[-1]}", stage, device)


def product_of(op: Operator) -> Product:
    """The product of an operator, with the layout that its kind of operand has."""
    assert op.gemm is not None
    batch, m, n, k = op.gemm
    layout = "tn" if op.over_rows else "nt" if op.label == "linear" else "nn"
    return Product(batch, m, n, k, op.dtype, layout)


def _attention(op: Operator, read: float, written: float, device: Device, ops: tuple[str, ...]) -> SimStage:
    """Fused attention: tiles of queries, which read the keys and values of their head through the L2."""
    tiles = max(1, op.tiles)
    ctas = min(tiles, CTAS_PER_SM * device.sms)
    merged = merge(tiles, ctas)
    whole = TileWork(
        tensor_flops=op.flops,
        dtype=op.dtype if op.dtype in device.tensor_flops else "bf16",
        simt_ops=op.simt_ops,
        sfu_ops=op.sfu_ops,
        l2_read=max(read, sum(x.touched for x in op.inputs)),
        l2_write=written,
        dram_read=read,
        dram_write=written,
    )
    return SimStage(
        op.name,
        Engine.TENSOR,
        merged,
        ctas,
        whole.scaled(1 / merged),
        registers=REGISTERS,
        ops=ops,
        source=op.source,
    )
