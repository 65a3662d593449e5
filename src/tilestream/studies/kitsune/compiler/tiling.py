"""What one tile of a pipeline's stage asks for, and how many rows a tile should have.

Tiles are blocks of rows; a product wider than the accumulators of a CTA is cut into blocks of columns as well. Weights
that fit stay in shared memory (Kitsune's stages are persistent), others are read through the L2 for every tile.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil, prod

from tilestream.devices import Device
from tilestream.ir.pipeline import Queue
from tilestream.simulator.library import lane_ops, merge
from tilestream.simulator.workload import Engine, TileWork
from tilestream.studies.kitsune.compiler.operators import Kind, Operand, Operator, OperatorGraph
from tilestream.studies.kitsune.compiler.split_reductions import SUM_COLUMNS, SUM_ROWS
from tilestream.studies.kitsune.compiler.staged import Staged
from tilestream.studies.kitsune.compiler.traffic import leaves, reads


@dataclass(frozen=True)
class Tile:
    """Rows of the tiles that stream, and columns of a product that one CTA makes of them.

    128 rows of 256 16-bit features are 64 KB, the payload that queues like, and fill the registers of a CTA with
    accumulators; half of that leaves room for a second tile, so that epilogue and products overlap.
    """

    rows: int
    columns: int

    @property
    def overlaps(self) -> bool:
        return 2 * self.rows * self.columns <= ACCUMULATORS


TILES = tuple(Tile(rows, columns) for rows in (16, 32, 64, 128) for columns in (64, 128, 256))
ACCUMULATORS = 128 * 256
"""fp32 accumulators of one tensor CTA: half of an SM's registers."""
ROW_BYTES = 2
"""Of an element of the tile that a CTA holds between two products."""
SIMT_SHARED = 8_192
STAGING = 16_384
"""Shared memory of a tensor stage beside its resident weights: two chunks of a tile on their way in."""
COLUMN_BY_COLUMN = (Kind.ELEMENTWISE, Kind.CAT, Kind.COPY, Kind.FILL)
WIDEST = 1_024
"""Bytes of a row in a tile of such an operator: 128 rows are 128 KB, a payload that queues like."""
SUM_STEPS = (4, 64)
"""Tiles of each CTA of a partial stage, least and most: it takes what streams past in so many steps, and its sum
leaves in as many. That keeps events few; the sum of a real CTA leaves once."""
FINAL_ELEMENTS = 1_024
FAN_IN = 8
"""Results, and partial sums, that one CTA of a final stage takes at most: the leaves of the tree."""


@dataclass(frozen=True)
class Work:
    """A stage's ``tiles``, the work of each, and what each CTA loads ``once``, with its shared memory in bytes.

    ``ring_bytes`` pass from and to queues with each tile.
    """

    tiles: int
    tile: TileWork
    once: TileWork
    shared_bytes: int
    ring_bytes: float = 0.0
    overlap: bool = False

    def seconds(self, device: Device) -> float:
        """Seconds that all tiles keep the busiest pipe of one SM, operands being on the chip (Alg. 2: 1 / (t s))."""
        return self.tiles * self.tile_s(device)

    def tile_s(self, device: Device) -> float:
        """A tile on one CTA: the products and then the epilogue, or the bytes that pass the SM's port."""
        t = self.tile
        tensor = t.full_rate_flops / (device.tensor_flops[t.dtype] / device.sms)
        lanes = max(t.simt_ops / (device.simt_flops / device.sms), t.sfu_ops / (device.sfu_ops_per_s / device.sms))
        port = (t.l2_read + t.l2_shared_read + t.l2_write + self.ring_bytes) / device.sm_bytes_per_s
        return max((max if self.overlap else sum)((tensor, lanes)) + t.latency_s, port)


def shapes(p: Staged) -> tuple[Tile, ...]:
    """The tiles to choose from. CTAs that take all operators in turn hold whole rows of every product."""
    if not p.vertical:
        return TILES
    widest = max((op.gemm[2] for ops in p.operators.values() for op in ops if op.gemm is not None), default=64)
    return tuple(Tile(rows, widest) for rows in (16, 32, 64, 128) if rows * widest <= ACCUMULATORS)


def works(
    p: Staged, graph: OperatorGraph, device: Device, shape: Tile, ctas: Mapping[str, int] | None = None
) -> dict[str, Work]:
    """The work of every stage of ``p`` with tiles of ``shape``. DRAM bytes go to the first stage that asks.

    Args:
        ctas: by stage, where they are known: final sums grow with the CTAs before them.
    """
    outside = reads(graph, p.node.ops)
    made = {value for name in p.node.ops for value in graph[name].outputs}
    ctas = ctas or {}
    found = {name: _work(name, p, graph, device, shape, ctas, made, outside) for name in p.names}
    ring = dict.fromkeys(found, 0.0)
    for queue, size in passed(p, shape, ctas):
        for name in (queue.producer, *queue.consumers):
            ring[name] += size / found[name].tiles
    return {name: replace(w, ring_bytes=ring[name]) for name, w in found.items()}


def passed(p: Staged, shape: Tile, ctas: Mapping[str, int]) -> list[tuple[Queue, float]]:
    """Every queue, and the bytes that pass through it: the value once, or one partial sum from each CTA."""
    finals = set(p.finals.values())
    return [
        (q, size * partial_sums(p, q.producer, shape, ctas) if finals.issuperset(q.consumers) else size)
        for q, size in p.passing
    ]


def partial_sums(p: Staged, stage: str, shape: Tile, ctas: Mapping[str, int]) -> float:
    """How many CTAs of a stage hold a sum for each result of a reduction in it."""
    tiles, blocks = tiles_of(p, stage, shape)
    if not p.is_partial(stage):
        blocks = 1  # a sum that rides on the tiles of another operator
    return max(1.0, min(ctas.get(stage, 1), tiles) / blocks)


def _work(
    stage: str,
    p: Staged,
    graph: OperatorGraph,
    device: Device,
    shape: Tile,
    ctas: Mapping[str, int],
    made: set[str],
    outside: dict[str, float],
) -> Work:
    """``outside`` are the bytes of values that no stage has loaded yet: what this one loads is taken out of it."""
    if p.is_final(stage):
        return _final(stage, p, graph, shape, ctas)
    ops, partial = p.operators[stage], p.is_partial(stage)
    head = ops[0]
    tiles, blocks = tiles_of(p, stage, shape)
    if partial and stage in ctas:
        tiles = merge(tiles, ctas[stage], sum_steps(tiles // ctas[stage]))
    products = [op for op in ops if op.gemm is not None]
    held = shape.rows * shape.columns * ROW_BYTES if len(products) > 1 else 0
    own = {value for op in ops for value in op.outputs}
    inputs = [(op, operand) for op in ops for operand in op.inputs if operand.value not in own]
    dram_read = l2_read = shared_read = resident = 0.0
    for op, operand in inputs:
        dram_read += outside.pop(operand.value, 0.0)
        times = _times(op, operand, partial, shape)
        if graph.values[operand.value].is_parameter and _fits(op, held + resident + operand.bytes / blocks, device):
            resident += operand.bytes / blocks
        elif graph.values[operand.value].is_parameter:
            shared_read += operand.touched * times
        else:
            l2_read += 0.0 if operand.value in made else operand.touched  # a queue brings it otherwise
            shared_read += operand.touched * (times - 1)
    dram_write = _leaving([op for op in ops if op.name not in p.finals], graph, p)
    flops = sum(op.flops for op in ops)
    results = sum(prod(graph.values[op.outputs[0]].shape) for op in products or ops[:1])
    sfu = sum(op.sfu_ops for op in ops)
    simt = sum(op.simt_ops for op in ops)
    tensor = p.engine(stage) is Engine.TENSOR
    if tensor:
        simt += 0.0 if partial else device.handoff_ops * results
    else:
        simt = lane_ops(max(elements(op, graph) for op in ops), simt, sfu)
    whole = TileWork(
        tensor_flops=flops,
        dtype=head.dtype if head.dtype in device.tensor_flops else "bf16",
        simt_ops=simt,
        sfu_ops=sfu,
        l2_read=l2_read,
        l2_shared_read=shared_read,
        l2_write=dram_write,
        dram_read=dram_read,
        dram_write=dram_write,
        tensor_share=_share(products, shape, device, partial) if flops else 1.0,
    )
    latency_s = device.turnaround_s * max(1, len(products)) if flops else 0.0
    shared = int(resident) + held + STAGING if tensor else SIMT_SHARED
    tile = whole.scaled(1 / tiles) + TileWork(latency_s=latency_s)
    return Work(tiles, tile, TileWork(l2_shared_read=resident), shared, overlap=shape.overlaps)


def _share(products: Sequence[Operator], shape: Tile, device: Device, partial: bool) -> float:
    """Of all products of a stage, one after another."""
    if len(products) < 2:
        return tensor_share(products[0], shape, device, partial) if products else 1.0
    full = sum(op.flops / tensor_share(op, shape, device, partial) for op in products)
    return sum(op.flops for op in products) / full


def tensor_share(op: Operator, shape: Tile, device: Device, partial: bool = False) -> float:
    """The share of the tensor rate that a tile of this shape reaches, its operands being in shared memory.

    Hopper's products have 64 rows; before it, warps need blocks of 32 x 32 to read each operand seldom enough.
    """
    if op.gemm is None:
        return 1.0
    _, m, n, _ = op.gemm
    rows, columns = (SUM_ROWS, SUM_COLUMNS) if partial else (shape.rows, shape.columns)
    least = 64 if device.compute_capability >= (9, 0) else 32
    small = 0.95 if min(rows, m) * min(columns, n) < 128 * 128 else 1.0
    return small * min(1.0, rows / least) * max(1 / 8, min(1.0, min(columns, n) / 32))


def sum_steps(tiles: int) -> int:
    """Steps of a CTA of a partial stage that is dealt ``tiles``: an eighth of them, between ``SUM_STEPS``."""
    least, most = SUM_STEPS
    return max(least, min(most, tiles // 8))


def tiles_of(p: Staged, stage: str, shape: Tile) -> tuple[int, int]:
    """Tiles of a stage, and blocks of columns (of results, for a partial sum) among them; its first operator decides.

    Operators that reduce a row have whole rows.
    """
    op = p.operators[stage][0]
    partial = p.is_partial(stage)
    if op.gemm is not None:
        batch, m, n, k = op.gemm
        if partial:
            blocks = batch * ceil(m / SUM_ROWS) * ceil(n / SUM_COLUMNS)
            return blocks * ceil(k / shape.rows), blocks
        blocks = ceil(n / shape.columns)
        return batch * ceil(m / shape.rows) * blocks, blocks
    if partial:
        return max(1, ceil(op.reduced / shape.rows)), 1
    rows = max(op.rows, 1)
    blocks = 1
    if all(x.kind in COLUMN_BY_COLUMN for x in p.operators[stage]):
        blocks = max(1, ceil(op.output_bytes[0] / WIDEST / rows))
    return ceil(rows / shape.rows) * blocks, blocks


def elements(op: Operator, graph: OperatorGraph) -> float:
    """Elements that a kernel goes over: of its results, or of the operand of which it touches most."""
    made = sum(size / _item(v, graph) for v, size in zip(op.outputs, op.output_bytes, strict=True))
    return max(made, *(x.touched / _item(x.value, graph) for x in op.inputs), 1.0)


def _item(value: str, graph: OperatorGraph) -> float:
    """Bytes of an element."""
    entry = graph.values[value]
    return max(1.0, entry.bytes / max(1, prod(entry.shape)))


def _times(op: Operator, operand: Operand, partial: bool, shape: Tile) -> int:
    """How often an operand passes from the L2 to SMs: a product reads its rows for every block of columns, and its
    other operand for every block of rows."""
    if op.gemm is None:
        return 1
    batch, m, n, k = op.gemm
    rows, columns = (SUM_ROWS, SUM_COLUMNS) if partial else (shape.rows, shape.columns)
    first = next((x.value for x in op.inputs if prod(x.shape) == batch * m * k), "") == operand.value
    return ceil(n / columns) if first else ceil(m / rows)


def _fits(op: Operator, size: float, device: Device) -> bool:
    """Whether a CTA can keep a block of a weight: beside its staging and the SIMT CTAs of its SM."""
    free = min(device.shared_bytes_per_cta, device.shared_bytes_per_sm - 2 * (SIMT_SHARED + 1024)) - STAGING - 1024
    return size <= free and (op.gemm is None or op.gemm[0] == 1)


def _leaving(ops: Sequence[Operator], graph: OperatorGraph, p: Staged) -> float:
    return sum(
        size
        for op in ops
        for value, size in zip(op.outputs, op.output_bytes, strict=True)
        if leaves(graph, op, value, p.node.ops)
    )


def _final(stage: str, p: Staged, graph: OperatorGraph, shape: Tile, ctas: Mapping[str, int]) -> Work:
    """The sum of what every CTA of the partial stage holds; its results go to memory."""
    (op,) = p.operators[stage]
    results = sum(prod(graph.values[v].shape) for v in op.outputs)
    parts = partial_sums(p, p.holder(op.name), shape, ctas)
    tiles = max(ceil(results / FINAL_ELEMENTS), ceil(parts / FAN_IN))
    leaving = _leaving([op], graph, p)
    adds = results * parts
    whole = TileWork(simt_ops=lane_ops(results, adds, 0.0), l2_write=leaving, dram_write=leaving)
    return Work(tiles, whole.scaled(1 / tiles), TileWork(), SIMT_SHARED)
