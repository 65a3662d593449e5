"""Kernels that stream: elementwise ones, copies, and reductions and gathers as good as Inductor's."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from tilestream.devices import Device
from tilestream.simulator.library.indexed import Indexed, traffic
from tilestream.simulator.library.stages import one_stage
from tilestream.simulator.workload import Engine, SimStage, TileWork

STREAM_TILE = 16_384
"""Elements of one CTA of an elementwise kernel at most, and at least ``STREAM_LEAST``."""
STREAM_LEAST = 1_024
LANE_BASE, LANE_SFU = 13.5, 6.1
"""Issue slots of an elementwise kernel beside one for each instruction of the lanes: of an element (load, unpack,
convert, index, store), of an instruction of the special function unit. Fitted."""
CTAS_PER_SM = 2
REGISTERS = 32_768


def lane_ops(elements: float, simt_ops: float, sfu_ops: float) -> float:
    """Issued lane operations of a real elementwise kernel for what is counted of its arithmetic.

    Fitted to eager's kernels on an H200 whose data lie in the L2 (docs/truth.md).
    """
    return LANE_BASE * elements + simt_ops + LANE_SFU * sfu_ops


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
    slots: float | None = None,
    latency_s: float = 0.0,
    cached: float = 0.0,
    by_index: Sequence[Indexed] = (),
) -> SimStage:
    """A kernel over ``elements`` that keeps the memory as busy as it can.

    Args:
        read, written: distinct bytes, from and to DRAM.
        touched: bytes loaded counting repeats, at least ``read``.
        slots: lane operations that it issues in all; by default those of an elementwise kernel with this arithmetic.
        latency_s: of every CTA, which nothing hides.
        cached: share of ``read`` and ``written`` that the L2 holds from before and keeps.
        by_index: tables of which it reads rows, or adds to them, by an index; distinct bytes are in ``read`` and
            ``written``.
    """
    ctas = CTAS_PER_SM * device.sms
    more = traffic(by_index, device)
    if more.serial_s:
        moved_s = (read + written + more.dram_read + more.dram_write) * (1 - cached) / device.dram_bytes_per_s
        added_s = (written + more.l2_write) / device.l2_bytes_per_s
        latency_s = max(latency_s, more.serial_s - max(moved_s, added_s))
    tiles = max(1, ceil(elements / STREAM_TILE), min(ceil(elements / STREAM_LEAST), ctas))
    if latency_s:
        tiles = min(tiles, ctas)  # one wave: what each CTA waits for, all wait for at once
    loaded = max(read, touched or 0.0)
    held = read * cached  # lines that nobody writes are read at the rate of shared ones
    work = TileWork(
        simt_ops=lane_ops(elements, simt_ops, sfu_ops) if slots is None else slots,
        sfu_ops=sfu_ops,
        l2_read=loaded - held,
        l2_shared_read=held + more.shared_read,
        l2_write=written + more.l2_write,
        dram_read=(read + more.dram_read) * (1 - cached),
        dram_write=(written + more.dram_write) * (1 - cached),
    )
    return one_stage(name, Engine.SIMT, tiles, min(tiles, ctas), REGISTERS, work, latency_s=latency_s)
