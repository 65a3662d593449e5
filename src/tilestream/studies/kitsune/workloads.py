"""From designs to what the simulator runs: operators of a bulk or vertical execution as kernels of a library."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from tilestream.devices import Device
from tilestream.graph.costs.work import layout
from tilestream.simulator.library import Attention, Gemm, Kernel, Product, Stream, launch, stage_of
from tilestream.simulator.library.products import Beside
from tilestream.simulator.workload import SimLaunch
from tilestream.studies.kitsune.compiler.operators import PRODUCTS, Kind, Operator, OperatorGraph
from tilestream.studies.kitsune.compiler.tiling import elements
from tilestream.studies.kitsune.compiler.traffic import reads, writes


def library_kernels(ops: Sequence[str], graph: OperatorGraph, device: Device) -> tuple[SimLaunch, ...]:
    """Operators as a library runs them: one kernel, or one a table where a counted operator stands for many tables."""
    op = graph[ops[0]]
    tables = len(op.outputs)
    kernel = kernel_of(ops, graph)
    made = launch(kernel.name, stage_of(kernel, device), device)
    if len(ops) > 1 or tables == 1 or op.kind not in (Kind.GATHER, Kind.SCATTER):
        return (made,)
    (stage,) = made.stages
    tiles = ceil(stage.tiles / tables)
    share = replace(
        stage, tiles=tiles, ctas=min(stage.ctas, tiles), work=stage.work.scaled(stage.tiles / tables / tiles)
    )
    return tuple(replace(made, name=f"{made.name}.{i}", stages=(share,)) for i in range(tables))


def kernel_of(ops: Sequence[str], graph: OperatorGraph) -> Kernel:
    """Operators as one kernel: a bulk operator, or a vertically fused group."""
    members = [graph[name] for name in ops]
    head = next((op for op in members if op.kind in PRODUCTS), members[0])
    read, written = reads(graph, ops), writes(graph, ops)
    name = ops[0] if len(ops) == 1 else f"{ops[0]}..{ops[-1]}"
    work = _work(head, members, graph, sum(read.values()))
    return Kernel(name, work, tuple(read.items()), tuple(written.items()), tuple(ops), head.source)


def _work(head: Operator, members: Sequence[Operator], graph: OperatorGraph, read: float) -> Gemm | Attention | Stream:
    """Several products of a group run one after another in the same CTAs; the first one's tiles are the group's."""
    simt, sfu = sum(op.simt_ops for op in members), sum(op.sfu_ops for op in members)
    if head.gemm is not None:
        more = sum(op.flops for op in members) - head.flops
        after = sum(op.kind in PRODUCTS for op in members) - 1 if more else 0
        return Gemm(product_of(head), Beside(simt, sfu, more_flops=more, more_products=after))
    touched = sum(operand.touched for operand in head.inputs) if len(members) == 1 else read
    if head.kind in PRODUCTS:
        return Attention(head.flops, head.dtype, max(1, head.tiles), head.simt_ops, head.sfu_ops, touched)
    return Stream(max(elements(op, graph) for op in members), simt, sfu, touched=touched)


def product_of(op: Operator) -> Product:
    """The product of an operator, with its operands as they lie."""
    assert op.gemm is not None
    return Product(*op.gemm, op.dtype, layout(op.node))
