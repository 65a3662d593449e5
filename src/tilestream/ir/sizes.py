"""How much a stage does for one tile: tensor FLOPs, lane operations, weights. No device, no time."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from tilestream.ir.columns import first_column
from tilestream.ir.pipeline import DTYPE_BYTES, ELEMENT_BYTES, Pipeline, Role, Stage, Tensor, Tile, TileOp
from tilestream.ir.taps import Tap
from tilestream.ir.tileops import OPS

SWIZZLE_BYTES = 128  # a linear's input is stored in rows of this many bytes, zero-filled


@dataclass(frozen=True)
class Phase:
    """One linear and the ops behind it, up to the next linear: what one warpgroup does in turn.

    ``flops`` are the tensor core's, padding included; ``lane_ops`` are issued fp32 lane operations and
    ``sfu_ops`` those of the special function unit; ``handed`` are elements that leave the registers.
    All of one tile.
    """

    flops: float
    dtype: str
    lane_ops: float
    sfu_ops: float
    handed: int


def phases(stage: Stage, pipeline: Pipeline) -> tuple[Phase, ...]:
    """The stage's work on one tile, cut at its linears. The first phase holds what comes before the first linear."""
    tiles = pipeline.tiles()
    groups: list[list[TileOp]] = [[]]
    for op in stage.ops:
        if op.kind == "linear":
            groups.append([])
        groups[-1].append(op)
    return tuple(_phase(group, stage, pipeline, tiles) for group in groups if group)


def _phase(ops: list[TileOp], stage: Stage, pipeline: Pipeline, tiles: dict[str, Tile]) -> Phase:
    flops, dtype, lane, sfu, handed = 0.0, "bf16", 0.0, 0.0, 0
    rows = stage.tile_rows
    for op in ops:
        if op.kind == "linear":
            weight = pipeline.tensor(op.params[0])
            flops, dtype = padded_flops(weight, rows, op.made.features), weight.dtype
            if len(op.params) == 2:
                lane += rows * op.made.features
            continue
        spec, elements = OPS[op.kind], rows * width(op, tiles)
        lane += spec.flops * elements
        sfu += spec.transcendental * elements
        if op.kind == "store":
            handed += elements
    used_by_linear = {n for op in stage.ops if op.kind in ("linear", "cat") for n in op.ins}
    queued = {q.tile for q in pipeline.queues if q.producer == stage.name}
    for op in ops:
        if op.out is not None and op.kind not in ("load", "cat") and op.out.name in used_by_linear | queued:
            handed += rows * op.out.features
    return Phase(flops, dtype, lane, sfu, handed)


def width(op: TileOp, tiles: dict[str, Tile]) -> int:
    """Features of the widest tile that ``op`` touches."""
    outs = [op.out.features] if op.out is not None else []
    return max(outs + [tiles[n].features for n in op.ins])


def padded_flops(weight: Tensor, rows: int, out: int) -> float:
    """Tensor-core FLOPs of ``rows`` rows through ``out`` rows of ``weight``: out padded to 8, in to 128 bytes."""
    inner = weight.features
    k = SWIZZLE_BYTES // DTYPE_BYTES[weight.dtype]
    return 2.0 * rows * (8 * ceil(out / 8)) * (k * ceil(inner / k))


def bytes_of(tensor: Tensor, rows: int) -> int:
    """Bytes of the whole tensor in device memory at ``rows`` rows."""
    size = prod(tensor.shape) * ELEMENT_BYTES[tensor.dtype]
    return size if tensor.role is Role.PARAMETER else rows * size


def loaded_bytes(op: TileOp, pipeline: Pipeline, rows: int) -> int:
    """Bytes that a load moves into its stage for ``rows`` rows: the rows, and the index that names them."""
    tensor = pipeline.tensor(op.params[0])
    index = bytes_of(pipeline.tensor(op.index), rows) if op.index else 0
    return rows * tensor.features * ELEMENT_BYTES[tensor.dtype] + index


def in_places(op: TileOp) -> bool:
    """Whether a load takes rows from other places than in order: through an index, or pixels at a tap."""
    return bool(op.index) or Tap.of(op) is not None


def table_bytes(op: TileOp, pipeline: Pipeline, rows: int) -> int:
    """Bytes of DRAM that ``rows`` rows taken through an index cost at least: the table once, or those rows where it
    has more of them, or has as many as the call says. Of pixels at taps: the pictures once."""
    table, tap = pipeline.tensor(op.params[0]), Tap.of(op)
    if tap is not None:
        return ceil(rows * bytes_of(table, 0) / tap.pixels)
    taken = rows * table.features * ELEMENT_BYTES[table.dtype]
    return min(taken, bytes_of(table, 0)) if len(table.shape) == 2 else taken


def weight_bytes(stage: Stage, pipeline: Pipeline) -> int:
    """Bytes of the matrices that the stage multiplies with, or of its parts of them, each counted once."""
    linears = [op for op in stage.ops if op.kind == "linear"]
    rows = {(op.params[0], first_column(op)): op.out.features for op in linears if op.out is not None}
    weights = {name: pipeline.tensor(name) for name, _ in rows}
    return sum(n * weights[w].features * DTYPE_BYTES[weights[w].dtype] for (w, _), n in rows.items())


def tiles_of(rows: int, p: Pipeline | Stage) -> int:
    """Tiles that ``p`` cuts so many rows into."""
    return ceil(rows / p.tile_rows)


def steps_of(stage: Stage, rows: int) -> int:
    """Steps of the busiest replica: whole steps of ``tiles_per_step`` tiles, dealt round-robin."""
    return ceil(ceil(tiles_of(rows, stage) / stage.tiles_per_step) / stage.replicas)


def at_once(stage: Stage, rows: int) -> int:
    """Replicas at work at once, the mean over the steps of the busiest one: some have no tile, or none in the last
    round."""
    return ceil(ceil(tiles_of(rows, stage) / stage.tiles_per_step) / steps_of(stage, rows))
