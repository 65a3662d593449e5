"""How one library kernel becomes a stage of the simulator: the bulk-synchronous baseline.

``l2_read`` and ``l2_write`` are all bytes that SMs load and store through the L2; ``dram_read`` and ``dram_write`` are
the distinct ones, which DRAM serves. A GEMM reads its operands once for each row or column of tiles that uses them.
"""

from __future__ import annotations

from dataclasses import replace
from math import ceil

from tilestream.devices import Device
from tilestream.ir import DTYPE_BYTES
from tilestream.simulator.workload import Engine, SimStage, TileWork

GEMM_TILES = ((256, 128), (128, 128), (128, 64), (64, 64))
"""Rows and columns of output of one CTA: what libraries choose from."""
SPLIT_K = 512
"""Least depth that a CTA of a GEMM keeps when its sum is split among CTAs."""
STREAM_TILE = 16_384
"""Elements of one CTA of an elementwise kernel."""
CTAS_PER_SM = 2
WAVES = 16
"""Tiles a CTA at most: longer runs of equal tiles are merged, which changes no rate, only the number of events."""
REGISTERS = 32_768
GEMM_LATENCY_S = 0.6e-6
"""First loads and last stores of a GEMM's tile: what the CTA beside it hides."""
STREAM_LATENCY_S = 0.4e-6


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
    ops: tuple[str, ...] = (),
    source: str = "",
) -> SimStage:
    """``batch`` products of [m, k] and [k, n] as one kernel; ``simt_ops`` and ``sfu_ops`` are its epilogue's.

    Args:
        dtype: ``bf16``, ``f16`` or ``f32``, of operands and result.
        dram_read, dram_write: bytes of the whole kernel; by default each operand and the result once.
    """
    size = DTYPE_BYTES.get(dtype, 2)
    rows, columns, splits = gemm_tiling(batch, m, n, k, device)
    down, across = ceil(m / rows), ceil(n / columns)
    tiles = batch * down * across * splits
    result = batch * m * n * size
    partial = 2 * batch * m * n * 4 * splits if splits > 1 else 0  # written as fp32 and summed from the L2
    read = batch * (m * k * across + k * n * down) * size
    return _stage(
        name,
        Engine.TENSOR,
        tiles,
        device,
        TileWork(
            tensor_flops=2.0 * batch * m * n * k,
            dtype=dtype if dtype in device.tensor_flops else "bf16",
            simt_ops=simt_ops + device.handoff_ops * batch * m * n * splits,
            sfu_ops=sfu_ops,
            l2_read=read + partial / 2,
            l2_write=result + partial / 2,
            dram_read=batch * (m * k + k * n) * size if dram_read is None else dram_read,
            dram_write=result if dram_write is None else dram_write,
        ),
        GEMM_LATENCY_S,
        ops or (name,),
        source,
    )


def gemm_tiling(batch: int, m: int, n: int, k: int, device: Device) -> tuple[int, int, int]:
    """Rows, columns and splits of the sum: the tiling whose last wave wastes least, larger tiles first."""
    best: tuple[float, tuple[int, int, int]] | None = None
    for rows, columns in GEMM_TILES:
        tiles = batch * ceil(m / rows) * ceil(n / columns)
        splits = max(1, min(k // SPLIT_K, device.sms // tiles)) if tiles < device.sms else 1
        waves = ceil(tiles * splits / device.sms)
        cost = waves * rows * columns * ceil(k / splits) * (1 + 24 / rows + 24 / columns)  # operands a product
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
    ops: tuple[str, ...] = (),
    source: str = "",
) -> SimStage:
    """An elementwise kernel, a reduction, a copy or a gather over ``elements``.

    Args:
        read, written: distinct bytes, from and to DRAM.
        touched: bytes loaded counting repeats, at least ``read``.
    """
    return _stage(
        name,
        Engine.SIMT,
        max(1, ceil(elements / STREAM_TILE)),
        device,
        TileWork(
            simt_ops=simt_ops,
            sfu_ops=sfu_ops,
            l2_read=max(read, touched or 0.0),
            l2_write=written,
            dram_read=read,
            dram_write=written,
        ),
        STREAM_LATENCY_S,
        ops or (name,),
        source,
    )


def _stage(
    name: str,
    engine: Engine,
    tiles: int,
    device: Device,
    whole: TileWork,
    latency_s: float,
    ops: tuple[str, ...],
    source: str,
) -> SimStage:
    ctas = min(tiles, CTAS_PER_SM * device.sms)
    merged = merge(tiles, ctas)
    work = whole.scaled(1 / merged) + TileWork(latency_s=latency_s * tiles / merged)
    return SimStage(name, engine, merged, ctas, work, registers=REGISTERS, ops=ops, source=source)


def merge(tiles: int, ctas: int, waves: int = WAVES) -> int:
    """Tiles after merging equal ones: at most ``waves`` a CTA, with the same share of work in the last wave."""
    if tiles <= waves * ctas:
        return tiles
    return max(ctas, round(tiles / ceil(tiles / (waves * ctas))))


def with_flops(stage: SimStage, flops: float) -> SimStage:
    """``stage`` with more tensor-core work in the same tiles: the further products of a vertically fused group."""
    return replace(stage, work=stage.work + TileWork(tensor_flops=flops / stage.tiles, dtype=stage.work.dtype))
