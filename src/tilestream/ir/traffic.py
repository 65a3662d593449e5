"""Bytes that a pipeline moves at each level of memory, counted from the IR alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import ceil

from tilestream.ir.axes import ROWS
from tilestream.ir.launches import cut_at_dram
from tilestream.ir.lengths import EDGES_A_NODE
from tilestream.ir.mesh_traffic import mesh_traffic
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, Residency, Role, Stage, Transport
from tilestream.ir.plain import by_rows, plain
from tilestream.ir.sizes import bytes_of, in_places, loaded_bytes, table_bytes, tiles_of, weight_bytes, width


@dataclass(frozen=True)
class Traffic:
    """Bytes at each level for one run.

    ``dram``: compulsory traffic. A launch reads each of its inputs and parameters once, however many of its stages
    take them (the later ones find them in the L2), and writes each output once; a DRAM queue's tensor is written by
    one launch and read by every launch that takes it. Rows are counted, not tiles: the tail is not padded.
    Of a table whose rows are taken through an index, each row counts once in DRAM and every take of it in the L2.
    A cache larger than a tensor between two launches makes real traffic smaller.
    ``l2``: all of that, plus tiles written to and read from L2 queues, inputs that further stages load again, and
    weights once a replica (resident) or once a step of each replica (streamed).
    ``shared``: operands written to and read from shared memory: tiles by linears, weights, staging of what leaves.
    ``registers``: fp32 operands and results of everything but loads, stores and layout ops.
    """

    registers: int
    shared: int
    l2: int
    dram_read: int
    dram_written: int
    tensors: tuple[tuple[str, int, int], ...]
    """(tensor, bytes read, bytes written) in DRAM."""

    @property
    def dram(self) -> int:
        return self.dram_read + self.dram_written

    def levels(self) -> dict[str, int]:
        """The four levels by name, as reports show them."""
        return {"registers": self.registers, "shared": self.shared, "l2": self.l2, "dram": self.dram}


def levels_of(pipeline: Pipeline, size: Mapping[str, int]) -> dict[str, int]:
    """Bytes of each level of any pipeline. ``size``: of the axes that are read at the call (``ir.lengths``)."""
    if by_rows(pipeline):
        return traffic(pipeline, size[ROWS.name]).levels()
    return mesh_traffic(plain(pipeline), size)


def traffic(pipeline: Pipeline, rows: int) -> Traffic:
    """Bytes at each level when ``pipeline`` runs over ``rows`` rows; all zero for no rows."""
    reads, writes = Counter[str](), Counter[str]()
    registers = shared = l2 = 0
    if rows > 0:
        for launch in cut_at_dram(pipeline):
            read, written = dram_of(launch, rows)
            reads.update(read)
            writes.update(written)
            l2 += sum(read.values()) + sum(written.values()) + sum(l2_of(launch, rows))
            for stage in launch.stages:
                registers += _registers(stage, launch, rows)
                shared += _shared(stage, launch, rows)
    names = dict.fromkeys([*reads, *writes])
    return Traffic(
        registers, shared, l2, sum(reads.values()), sum(writes.values()), tuple((n, reads[n], writes[n]) for n in names)
    )


def dram_of(launch: Pipeline, rows: int) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes read and written in DRAM by one launch, by tensor."""
    read: dict[str, int] = {}
    written: dict[str, int] = {}
    for stage in launch.stages:
        for op in stage.ops:
            stored = op.params[:1] if op.out is None else ()
            for name in op.params:
                (written if name in stored else read)[name] = bytes_of(launch.tensor(name), rows)
            if op.receivers:
                written[op.params[0]] //= EDGES_A_NODE
            if in_places(op):
                read[op.params[0]] = table_bytes(op, launch, rows)
    return read, written


def l2_of(launch: Pipeline, rows: int) -> tuple[int, int]:
    """Bytes that one launch moves in the L2 beyond its DRAM traffic: (queues and repeated loads, weights and taps).

    A tile's taps take the same lines one after the other, as its SM takes weights again at every step: what limits both
    is the SM's port. On an H200 a 3 x 3 in front of a 1 x 1 moves 9 TB/s so.
    """
    tiles = launch.tiles()
    rings = sum(
        rows * tiles[q.tile].features * DTYPE_BYTES[tiles[q.tile].dtype] * (1 + len(q.consumers))
        for q in launch.queues
        if q.transport is Transport.L2
    )
    ops = [op for stage in launch.stages for op in stage.ops]
    loaded = [op.params[0] for op in ops if op.kind == "load"]
    loads = Counter(name for name in loaded if launch.tensor(name).role is not Role.PARAMETER)
    again = sum((count - 1) * bytes_of(launch.tensor(name), rows) for name, count in loads.items())
    indexed = [op for op in ops if in_places(op)]
    once = {op.params[0]: table_bytes(op, launch, rows) for op in indexed}
    tapped = [op for op in indexed if not op.index]
    taps = sum(loaded_bytes(op, launch, rows) for op in tapped) - sum(once[n] for n in {op.params[0] for op in tapped})
    again += sum(loaded_bytes(op, launch, rows) for op in indexed) - sum(once.values()) - taps
    again -= sum(bytes_of(launch.tensor(name), rows) for name in {op.index for op in indexed if op.index})
    weights = 0
    for stage in launch.stages:
        once = weight_bytes(stage, launch)
        total_steps = ceil(tiles_of(rows, stage) / stage.tiles_per_step)
        times = stage.replicas if stage.residency is Residency.RESIDENT else total_steps
        weights += max(0, times - 1) * once
    return rings + again, weights + taps


def _registers(stage: Stage, launch: Pipeline, rows: int) -> int:
    tiles = launch.tiles()
    total = 0
    for op in stage.ops:
        if op.out is None or op.kind in ("load", "cat", "slice"):
            continue
        operands = 0 if op.kind == "linear" else sum(tiles[n].features for n in op.ins)
        total += rows * 4 * (operands + op.out.features)
    return total


def _shared(stage: Stage, launch: Pipeline, rows: int) -> int:
    tiles = launch.tiles()
    count = tiles_of(rows, stage)
    steps = ceil(count / stage.tiles_per_step)
    total = 0
    for op in stage.ops:
        if op.kind == "linear":
            matrix = launch.tensor(op.params[0])
            weight = op.made.features * matrix.features * DTYPE_BYTES[matrix.dtype]
            loads = stage.replicas if stage.residency is Residency.RESIDENT else steps
            total += 2 * rows * tiles[op.ins[0]].row_bytes + weight * (count + loads)
        elif op.kind in ("load", "store"):
            total += rows * width(op, tiles) * DTYPE_BYTES[launch.tensor(op.params[0]).dtype]
    return total
