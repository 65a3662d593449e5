"""How one library kernel becomes a stage of the simulator: the bulk-synchronous baseline.

``l2_read`` and ``l2_write`` are all bytes that SMs load and store through the L2; ``dram_read`` and ``dram_write`` are
the distinct ones, which DRAM serves. A GEMM reads its operands once for each row or column of tiles that uses them.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from tilestream.devices import Device
from tilestream.ir.pipeline import DTYPE_BYTES
from tilestream.simulator.workload import Engine, SimLaunch, SimStage, TileWork

GEMM_TILES = {(256, 128): 1.0, (128, 256): 1.0, (128, 192): 0.98, (128, 128): 0.95, (128, 64): 0.95, (64, 64): 0.9}
"""Rows and columns of output of one CTA, from which libraries choose, and the share of the tensor rate it reaches:
small tiles read more operands from shared memory for each product."""
SPLIT_K = 512
"""Least depth that a CTA of a GEMM keeps when its sum is split among CTAs."""
GEMM_SHARE = 1.0
"""Of the tensor rate, in the main loop."""
GEMM_LATENCY_S = 1.15e-6
"""Of each tile: first loads, last products and epilogue, which its CTA, alone on its SM, covers with nothing."""
UNALIGNED_SHARE = 0.2
"""What is left of that where rows of an operand are no multiples of 16 bytes, which loads of whole lines need."""
MULTICAST = 2
"""CTAs of a cluster that share what they load, from Hopper on."""
STREAM_TILE = 16_384
"""Elements of one CTA of an elementwise kernel at most, and at least ``STREAM_LEAST``."""
STREAM_LEAST = 1_024
LANE_BASE, LANE_SIMT, LANE_SFU = 16.0, 1.45, 4.4
"""Issue slots of an elementwise kernel: an element (load, unpack, convert, index, store), a listed op, an SFU op."""
CTAS_PER_SM = 2
WAVES = 16
"""Tiles a CTA at most: longer runs of equal tiles are merged, which changes no rate, only the number of events."""
REGISTERS = 32_768
GAP_S = 0.65e-6
"""From one kernel of a CUDA graph to the next, without its first load."""
L2_LATENCY_S = 0.55e-6
"""From a kernel's start to its first data, from the L2."""
DRAM_LATENCY_S = 0.63e-6
"""And further, from DRAM."""


def lane_ops(elements: float, simt_ops: float, sfu_ops: float) -> float:
    """Issued lane operations of a real elementwise kernel for what is counted of its arithmetic.

    Fitted to eager's kernels on an H200 whose data lie in the L2 (docs/truth.md).
    """
    return LANE_BASE * elements + LANE_SIMT * simt_ops + LANE_SFU * sfu_ops


def gemm(
    name: str,
    batch: int,
    m: int,
    n: int,
    k: int,
    dtype: str,
    device: Device,
    *,
    dram_read: float | None = None,
    dram_write: float | None = None,
    simt_ops: float = 0.0,
    sfu_ops: float = 0.0,
    cached: float = 0.0,
    transposed: bool = False,
    ops: tuple[str, ...] = (),
    source: str = "",
) -> SimStage:
    """``batch`` products of [m, k] and [k, n] as one kernel; ``simt_ops`` and ``sfu_ops`` are its epilogue's.

    Args:
        dtype: ``bf16``, ``f16`` or ``f32``, of operands and result.
        dram_read, dram_write: bytes of the whole kernel; by default each operand and the result once.
        cached: share of those that the L2 holds from before and keeps.
        transposed: operands lie as [k, m] and [k, n], as for gradients of weights.
    """
    size = DTYPE_BYTES.get(dtype, 2)
    rows, columns, splits = gemm_tiling(batch, m, n, k, device, dtype)
    down, across = ceil(m / rows), ceil(n / columns)
    tiles = batch * down * across * splits
    result = batch * m * n * size
    partial = 2 * batch * m * n * 4 * splits if splits > 1 else 0  # written as fp32 and summed from the L2
    read = batch * (m * k * across + k * n * down) * size / _multicast(device)
    dram_read = batch * (m * k + k * n) * size if dram_read is None else dram_read
    flops = 2.0 * batch * m * n * k
    dtype = dtype if dtype in device.tensor_flops else "bf16"
    aligned = UNALIGNED_SHARE if ((m if transposed else k) * size) % 16 or (n * size) % 16 else 1.0
    slower = 1 / (GEMM_SHARE * GEMM_TILES[rows, columns] * aligned) - 1
    latency_s = GEMM_LATENCY_S + slower * flops / tiles / (device.tensor_flops[dtype] / device.sms)
    work = TileWork(
        tensor_flops=flops,
        dtype=dtype,
        simt_ops=simt_ops + device.handoff_ops * batch * m * n * splits,
        sfu_ops=sfu_ops,
        l2_read=partial / 2,
        l2_shared_read=read,
        l2_write=result + partial / 2,
        dram_read=dram_read * (1 - cached),
        dram_write=(result if dram_write is None else dram_write) * (1 - cached),
    )
    ctas = min(tiles, device.sms)
    return _stage(name, Engine.TENSOR, tiles, ctas, device.registers_per_sm, work, latency_s, ops or (name,), source)


def _multicast(device: Device) -> int:
    return MULTICAST if device.compute_capability >= (9, 0) else 1


def gemm_tiling(batch: int, m: int, n: int, k: int, device: Device, dtype: str = "bf16") -> tuple[int, int, int]:
    """Rows, columns and splits of the sum: what takes the least time on the tensor pipes, larger tiles first."""
    rate = device.tensor_flops.get(dtype, device.tensor_flops["bf16"]) / device.sms
    best: tuple[float, tuple[int, int, int]] | None = None
    for (rows, columns), share in GEMM_TILES.items():
        tiles = batch * ceil(m / rows) * ceil(n / columns)
        most = max(1, min(k // SPLIT_K, device.sms // tiles)) if tiles < device.sms else 1
        for splits in {1, most}:
            waves = ceil(tiles * splits / device.sms)
            one = 2.0 * rows * columns * ceil(k / splits) / (rate * share * GEMM_SHARE)
            together = GEMM_LATENCY_S + 8.0 * batch * m * n * splits / device.l2_bytes_per_s if splits > 1 else 0.0
            cost = waves * (one + GEMM_LATENCY_S) + together
            if best is None or cost < best[0] * 0.999:
                best = (cost, (rows, columns, splits))
    assert best is not None
    return best[1]


def stream(
    name: str,
    elements: float,
    read: float,
    written: float,
    device: Device,
    *,
    touched: float | None = None,
    simt_ops: float = 0.0,
    sfu_ops: float = 0.0,
    cached: float = 0.0,
    ops: tuple[str, ...] = (),
    source: str = "",
) -> SimStage:
    """An elementwise kernel, a reduction, a copy or a gather over ``elements``.

    Args:
        read, written: distinct bytes, from and to DRAM.
        touched: bytes loaded counting repeats, at least ``read``.
        cached: share of ``read`` and ``written`` that the L2 holds from before and keeps.
    """
    slots = CTAS_PER_SM * device.sms
    tiles = max(1, ceil(elements / STREAM_TILE), min(ceil(elements / STREAM_LEAST), slots))
    work = TileWork(
        simt_ops=lane_ops(elements, simt_ops, sfu_ops),
        sfu_ops=sfu_ops,
        l2_read=max(read, touched or 0.0),
        l2_write=written,
        dram_read=read * (1 - cached),
        dram_write=written * (1 - cached),
    )
    return _stage(name, Engine.SIMT, tiles, min(tiles, slots), REGISTERS, work, 0.0, ops or (name,), source)


def _stage(
    name: str,
    engine: Engine,
    tiles: int,
    ctas: int,
    registers: int,
    whole: TileWork,
    latency_s: float,
    ops: tuple[str, ...],
    source: str,
) -> SimStage:
    merged = merge(tiles, ctas)
    work = whole.scaled(1 / merged) + TileWork(latency_s=latency_s * tiles / merged)
    return SimStage(name, engine, merged, ctas, work, registers=registers, ops=ops, source=source)


def launch(name: str, stage: SimStage) -> SimLaunch:
    """A library kernel by itself: the gap before it, and what its first load takes to come."""
    return SimLaunch(name, (stage,), launch_s=GAP_S + L2_LATENCY_S + (DRAM_LATENCY_S if stage.work.dram_read else 0.0))


def merge(tiles: int, ctas: int, waves: int = WAVES) -> int:
    """Tiles after merging equal ones: at most ``waves`` a CTA, with the same share of work in the last wave."""
    if tiles <= waves * ctas:
        return tiles
    return max(ctas, round(tiles / ceil(tiles / (waves * ctas))))


def with_flops(stage: SimStage, flops: float, products: int) -> SimStage:
    """``stage`` with ``products`` more in the same tiles: those of a vertically fused group, one after another."""
    more = TileWork(tensor_flops=flops / stage.tiles, dtype=stage.work.dtype, latency_s=products * GEMM_LATENCY_S)
    return replace(stage, work=stage.work + more)
