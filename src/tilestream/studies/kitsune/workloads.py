"""From designs to what the simulator runs: every launch of a bulk, vertical or spatial execution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import ceil

from tilestream.devices import Device
from tilestream.plan.spatial.operators import Kind, Operator, OperatorGraph
from tilestream.plan.spatial.traffic import reads, writes
from tilestream.simulator.library import Beside, Product, gemm, launch, merge, stream
from tilestream.simulator.library.stages import start_s
from tilestream.simulator.library.streams import CTAS_PER_SM, REGISTERS
from tilestream.simulator.tables import spilled
from tilestream.simulator.workload import Engine, SimLaunch, SimQueue, SimStage, TileWork
from tilestream.studies.kitsune.pipeline import PRODUCTS, Ring, Spatial
from tilestream.studies.kitsune.tiling import Tile, elements, ring_bytes, works

TENSOR_REGISTERS = 32_768
SIMT_REGISTERS = 16_384
"""Of a CTA: one tensor and two SIMT CTAs fill an SM, so that all stages are resident under one arbiter too."""
DEPTH = 2
"""Entries of a ring (Kitsune 2.1: double buffers)."""


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


def spatial(p: Spatial, graph: OperatorGraph, device: Device) -> SimLaunch:
    """A balanced pipeline as one launch: its stages, resident together, and rings of ``DEPTH`` or as deep as needed.

    Each pair of a producing and a consuming CTA has a ring of its own, of ``DEPTH`` entries. It holds besides what its
    consumer takes at once, and what passes by on a longer way while it waits (skip connections).
    Queues are to stay in the L2, as the paper's do: where double buffers do not fit into it, they are single ones.
    """
    shape = Tile(p.rows, p.columns)
    work = works(p, graph, device, shape)
    stages = []
    for stage in p.stages:
        w, ctas = work[stage.name], p.ctas[stage.name]
        tensor = stage.engine is Engine.TENSOR
        stages.append(
            SimStage(
                stage.name,
                stage.engine,
                w.tiles,
                ctas,
                w.tile,
                once=w.once,
                registers=TENSOR_REGISTERS if tensor else SIMT_REGISTERS,
                shared_bytes=w.shared_bytes,
                ops=stage.ops,
                source=graph[stage.ops[0]].source,
                overlap=w.overlap,
            )
        )
    made = SimLaunch(p.node.name, tuple(stages), launch_s=start_s(device))
    sizes = {ring: ring_bytes(ring, p, graph, shape) for ring in p.rings}
    double, single = (replace(made, queues=_queues(p, made, sizes, depth)) for depth in (DEPTH, 1))
    return double if not spilled(double, device) or spilled(single, device) else single


def _queues(p: Spatial, launch: SimLaunch, sizes: dict[Ring, float], depth: int) -> tuple[SimQueue, ...]:
    """A ring for each queue, ``depth`` deep for a pair of CTAs; ``sizes`` are bytes that pass through each."""
    tiles = {s.name: s.tiles for s in launch.stages}
    level = levels(p)
    queues = []
    for ring in p.rings:
        slack = max(level[c] - level[ring.producer] for c in ring.consumers) - 1
        taken = max(
            max(p.ctas[c] for c in ring.consumers), *(ceil(tiles[ring.producer] / tiles[c]) for c in ring.consumers)
        )
        entries = max(depth * (1 + slack), ceil(depth * taken / p.ctas[ring.producer]))
        queues.append(SimQueue(ring.producer, ring.consumers, sizes[ring] / tiles[ring.producer], entries))
    return tuple(queues)


def levels(p: Spatial) -> dict[str, int]:
    """How many queues the longest way to each stage passes."""
    found = {s.name: 0 for s in p.stages}
    for _ in p.stages:  # at most as many rounds as stages: the pipeline has no cycles
        changed = False
        for ring in p.rings:
            for c in ring.consumers:
                if found[c] <= found[ring.producer]:
                    found[c] = found[ring.producer] + 1
                    changed = True
        if not changed:
            break
    return found
