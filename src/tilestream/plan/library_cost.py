"""How long PyTorch's own kernels take: a library GEMM for every linear, a kernel of Inductor's for what lies between.

What ``bulk`` pipelines and the fallback are predicted by. Fitted to GEMMs and elementwise kernels of one H200
(``benchmarks/results/silicon.json``); held against Inductor in docs/cost-model.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tilestream.devices import Device
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, TileOp
from tilestream.ir.sizes import padded_flops, tiles_of, width
from tilestream.ir.tileops import OPS
from tilestream.plan.traffic import dram_of

GEMM_ROWS, GEMM_COLUMNS, GEMM_NARROW = 128, 256, 128  # a CTA's tile of the result; columns where there are no more
STAYS, LOST = 0.6, 1.0
"""Shares of the L2 up to which a kernel finds its operands in it, from the kernel before, and from which none."""


@dataclass(frozen=True)
class LibraryCost:
    """Seconds of a launch's kernels, launches included, and of what is in them."""

    tensor_s: float
    lane_s: float
    memory_s: float
    total_s: float


def library_cost(launch: Pipeline, rows: int, device: Device) -> LibraryCost:
    """One launch of a ``bulk`` pipeline: its linears, then all its other ops as one kernel.

    A GEMM's loads, products and stores overlap in part, and every wave of CTAs waits for its first operands. An
    elementwise kernel takes the longer of its bytes and its instructions.
    """
    ops = [op for stage in launch.stages for op in stage.ops]
    linears = [op for op in ops if op.kind == "linear"]
    others = [op for op in ops if OPS[op.kind].family not in ("memory", "linear")]
    read, written = dram_of(launch, rows)
    moved = sum(read.values()) + sum(written.values())
    tensor = memory = total = 0.0
    for op in linears:
        weight = launch.tensor(op.params[0])
        out, inner = weight.shape
        element = DTYPE_BYTES[weight.dtype]
        size = (rows * (out + inner) + out * inner) * element
        columns = ceil(out / (GEMM_NARROW if out <= GEMM_NARROW else GEMM_COLUMNS))
        waves = ceil(ceil(rows / GEMM_ROWS) * columns / device.sms)
        product_s = _product_s(op, launch, rows, device)
        memory_s = _memory_s(size, device)
        total += device.launch_s + waves * device.load_s + device.library_share * (memory_s + product_s)
        tensor, memory = tensor + product_s, memory + memory_s
        moved += 2 * rows * out * element - size if others else -size
    lanes = 0.0
    if others or not linears:
        lanes = _lanes_s(others, launch, rows, device)
        memory_s = _memory_s(max(0, moved), device)
        total += device.launch_s + max(memory_s, lanes)
        memory += memory_s
    return LibraryCost(tensor, lanes, memory, total)


def _product_s(op: TileOp, launch: Pipeline, rows: int, device: Device) -> float:
    """On the tensor cores. Operands whose rows are no multiple of 16 bytes take another, slower kernel."""
    weight = launch.tensor(op.params[0])
    aligned = all(n * DTYPE_BYTES[weight.dtype] % 16 == 0 for n in weight.shape)
    rate = device.tensor_flops[weight.dtype] * (1.0 if aligned else device.unaligned_share)
    whole = tiles_of(rows, launch) * launch.tile_rows
    return padded_flops(weight, whole) / rate


def _lanes_s(ops: list[TileOp], launch: Pipeline, rows: int, device: Device) -> float:
    """Of an elementwise kernel, which reaches a share of the lanes' rate."""
    tiles = launch.tiles()
    issued = sum(OPS[op.kind].flops * width(op, tiles) for op in ops)
    special = sum(OPS[op.kind].transcendental * width(op, tiles) for op in ops)
    rate = device.library_lanes
    whole = tiles_of(rows, launch) * launch.tile_rows
    return whole * max(issued / (rate * device.simt_flops), special / device.sfu_ops_per_s)


def _memory_s(size: float, device: Device) -> float:
    held = min(1.0, max(0.0, (LOST - size / device.l2_bytes) / (LOST - STAYS)))
    return size * ((1 - held) / device.dram_bytes_per_s + held / device.l2_shared_bytes_per_s)
