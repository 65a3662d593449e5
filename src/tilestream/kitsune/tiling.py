"""What one tile of a pipeline's stage asks for, and how many rows a tile should have.

Tiles are blocks of rows; a product wider than the accumulators of a CTA is cut into blocks of columns as well. Weights
that fit stay in shared memory (Kitsune's stages are persistent), others are read through the L2 for every tile.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from tilestream.devices import Device
from tilestream.kitsune.operators import Operator, OperatorGraph
from tilestream.kitsune.pipeline import Half, Spatial, Stage
from tilestream.kitsune.regions import leaves, reads
from tilestream.simulator.workload import Engine, TileWork

ROWS = (16, 32, 64, 128)
"""Candidates for the rows of a tile: 128 rows of 256 16-bit features are 64 KB, the payload that queues like."""
COLUMNS = 256
"""Columns that the accumulators of one CTA hold, for 128 rows: half of an SM's registers."""
ACCUMULATOR_ROWS = 128
STREAM_ELEMENTS = 16_384
SIMT_SHARED = 8_192
STAGING = 16_384
"""Shared memory of a tensor stage beside its resident weights: two chunks of a tile on their way in."""


@dataclass(frozen=True)
class Work:
    """A stage's ``tiles``, the work of each, and what each CTA loads ``once``, with its shared memory in bytes."""

    tiles: int
    tile: TileWork
    once: TileWork
    shared_bytes: int

    def seconds(self, device: Device) -> float:
        """Seconds that all tiles keep the busiest pipe of one SM, operands being on the chip (Alg. 2: 1 / (t s))."""
        return self.tiles * self.tile_s(device)

    def tile_s(self, device: Device) -> float:
        t = self.tile
        return max(
            t.tensor_flops / (device.tensor_flops[t.dtype] / device.sms),
            t.simt_ops / (device.simt_flops / device.sms),
            t.sfu_ops / (device.sfu_ops_per_s / device.sms),
            (t.l2_read + t.l2_write) / device.sm_bytes_per_s,
        )


def works(p: Spatial, graph: OperatorGraph, device: Device, rows: int) -> dict[str, Work]:
    """The work of every stage of ``p`` with tiles of ``rows`` rows. DRAM bytes go to the first stage that asks."""
    outside = reads(graph, p.node.ops)
    made = {value for name in p.node.ops for value in graph[name].outputs}
    return {stage.name: _work(stage, p, graph, device, rows, made, outside) for stage in p.stages}


def _work(
    stage: Stage,
    p: Spatial,
    graph: OperatorGraph,
    device: Device,
    rows: int,
    made: set[str],
    outside: dict[str, float],
) -> Work:
    """``outside`` are the bytes of values that no stage has loaded yet: what this one loads is taken out of it."""
    if stage.half is Half.FINAL:
        return _final(stage, p, graph)
    ops = [graph[name] for name in stage.ops]
    head = ops[0]
    tiles, blocks = tiles_of(head, graph, rows, stage.half)
    own = {value for op in ops for value in op.outputs}
    dram_read = l2_read = dram_write = 0.0
    resident = 0.0
    for op in ops:
        for operand in op.inputs:
            if operand.value in own:
                continue
            dram_read += outside.pop(operand.value, 0.0)
            again = _reads(op, operand.value, operand.touched, blocks, tiles)
            if graph.values[operand.value].is_parameter and _fits(head, operand.bytes, blocks, device):
                resident += operand.bytes
            elif operand.value in made:
                l2_read += max(0.0, again - operand.bytes)  # the queue brings it once
            else:
                l2_read += max(again, operand.bytes)
    if stage.half is Half.WHOLE:
        for op in ops:
            for value, size in zip(op.outputs, op.output_bytes, strict=True):
                if leaves(graph, op, value, p.node.ops):
                    dram_write += size
    flops = sum(op.flops for op in ops)
    handed = device.handoff_ops * prod(graph.values[head.outputs[0]].shape) if flops else 0.0
    whole = TileWork(
        tensor_flops=flops,
        dtype=head.dtype if head.dtype in device.tensor_flops else "bf16",
        simt_ops=sum(op.simt_ops for op in ops) + (handed if stage.half is Half.WHOLE else 0.0),
        sfu_ops=sum(op.sfu_ops for op in ops),
        l2_read=l2_read,
        l2_write=dram_write,
        dram_read=dram_read,
        dram_write=dram_write,
    )
    shared = int(resident) + STAGING if stage.engine is Engine.TENSOR else SIMT_SHARED
    return Work(tiles, whole.scaled(1 / tiles), TileWork(l2_read=resident), shared)


def tiles_of(op: Operator, graph: OperatorGraph, rows: int, half: Half = Half.WHOLE) -> tuple[int, int]:
    """Tiles of the stage that ``op`` heads, and blocks of columns (of results, for a partial sum) among them."""
    if op.gemm is not None:
        batch, m, n, k = op.gemm
        if half is Half.PARTIAL:
            blocks = batch * ceil(m / ACCUMULATOR_ROWS) * ceil(n / COLUMNS)
            return blocks * ceil(k / rows), blocks
        blocks = ceil(n / COLUMNS)
        return batch * ceil(m / rows) * blocks, blocks
    if half is Half.PARTIAL:
        return max(1, ceil(op.reduced / rows)), 1
    return max(1, ceil(max(op.rows, 1) / rows)), 1


def _reads(op: Operator, value: str, touched: float, blocks: int, tiles: int) -> float:
    """Bytes of an operand that pass from the L2 to SMs: a product reads its tile for every block of columns, and its
    other operand for every block of rows."""
    if op.gemm is None:
        return touched
    batch, m, n, k = op.gemm
    first = op.inputs and next((x.value for x in op.inputs if prod(x.shape) == batch * m * k), "") == value
    return touched * (blocks if first else max(1, tiles // (blocks * batch)))


def _fits(head: Operator, size: float, blocks: int, device: Device) -> bool:
    """Whether a CTA can keep the whole of a weight: beside its staging and the SIMT CTAs of its SM."""
    free = min(device.shared_bytes_per_cta, device.shared_bytes_per_sm - 2 * (SIMT_SHARED + 1024)) - STAGING
    return blocks == 1 and size <= free and (head.gemm is None or head.gemm[0] == 1)


def _final(stage: Stage, p: Spatial, graph: OperatorGraph) -> Work:
    op = graph[stage.ops[0]]
    elements = sum(prod(graph.values[v].shape) for v in op.outputs)
    parts = max(1, p.ctas.get(stage.name.removesuffix(".final"), 1))
    tiles = max(1, ceil(elements / STREAM_ELEMENTS))
    leaving = sum(
        size for value, size in zip(op.outputs, op.output_bytes, strict=True) if leaves(graph, op, value, p.node.ops)
    )
    whole = TileWork(simt_ops=float(elements * parts), l2_write=leaving, dram_write=leaving)
    return Work(tiles, whole.scaled(1 / tiles), TileWork(), SIMT_SHARED)
