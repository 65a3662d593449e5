"""How long a tiled block takes: units a cluster, pages a unit, and what no product covers."""

from __future__ import annotations

from math import ceil

from tilestream.devices import Device
from tilestream.devices.h200 import H200
from tilestream.ir.pipeline import DTYPE_BYTES, TileOp
from tilestream.ir.tileops import OPS
from tilestream.kernels.coefficients import scaling
from tilestream.kernels.costs import Amount, Counts
from tilestream.kernels.product.tiled_block.model import CLUSTER, COLUMNS, DEPTH, ROWS, TiledBlock

SHARE = 0.84
"""Of the tensor cores' rate while pages flow, at the power limit. This and the next two are fitted to six blocks on an
H200 (``fitted_us`` of benchmarks/results/tiled_blocks.json): 3 % off on average, 5 % at most."""
BETWEEN_S = 0.2e-6
"""Between two sums, besides the arithmetic of an epilogue."""
ISSUE = 1.4
"""Of an epilogue's arithmetic, times what the lanes need for its instructions."""
SECTOR = 32
"""Bytes a cycle that an SM stores of results that leave from registers, eight rows an instruction. Assumed."""
ROW_S = 1.4e-6
"""A row that one warp makes beside products: what bound LayerNorm, 768-2304 as one launch on an H200, 176 us for 16,384
rows made one by one (docs/wide-layers.md); two at once are assumed to take as long each. Six blocks that were fitted
have longer products."""
LEFT_COLUMNS = 64
"""A product takes the time of its columns and of so many more, for the rows of its left operand: with 192, 0.8 of that
with 256. Assumed. On an H200 blocks with such tiles took 7 to 15 % longer than predicted: 156.7 us for 139.3 (24,579
rows of 320-864-320), 93.0 for 81.2 (12,608 of 384-1536-384), 87.4 for 81.9 (12,544 of a ResMLP's)."""
START_S = 6.0e-6
"""Launch, barriers and the first pages; rows that are made in front of the first product. Of it ``launch_s`` is the
device's, and the rest are cycles."""


def tiled_block_cost(s: TiledBlock, rows: int, device: Device) -> Counts:
    """One launch on ``rows`` rows. What the ring of the hidden layer has beyond the L2 goes to DRAM and back.

    A page, half of the columns of which come by the other CTA of the cluster, comes through the SM's port and by its
    share of the L2; on an H200 its products take longer.
    """
    walk = s.walk(rows)
    k, hid, out = s.block.sizes
    firsts, seconds = (ceil(n / s.clusters) for n in (walk.all_firsts, walk.all_seconds))
    moved = 2 * DEPTH * (ROWS + COLUMNS / CLUSTER)
    page = (
        Amount("tensor", 2.0 * ROWS * COLUMNS * DEPTH, device.tensor_flops[s.block.dtype] / device.sms * SHARE),
        Amount("SM port", moved, device.sm_bytes_per_s),
        Amount("l2", moved * s.ctas, device.l2_shared_bytes_per_s),
    )
    between = BETWEEN_S * scaling.cycles(device)
    hidden_s = between + _arithmetic_s(s.block.middle, s.hidden_columns, device)
    result_s = between + _arithmetic_s(s.block.lasts[0].after, s.result_columns, device)
    if s.direct:
        result_s += ROWS * s.result_columns * 4 / SECTOR / device.clock_hz

    share = (s.second_columns + LEFT_COLUMNS) / (COLUMNS + LEFT_COLUMNS)

    def units(name: str, firsts: int, seconds: int) -> Counts:
        products = Counts("products", page, max, firsts * s.first_steps + share * seconds * s.second_steps)
        return Counts(name, (products, Amount("epilogue", firsts * hidden_s + seconds * result_s)))

    b, work = s.block, units("work", firsts, seconds)
    stored = DTYPE_BYTES[b.output_dtype] * out
    read = sum(op.made.row_bytes for op in b.loads) + (0 if b.before else 2 * k)
    dram = rows * (read + stored) + 2 * hid * (k * len(b.firsts) + out * b.products)
    spilled = max(0.0, 1 - device.l2_bytes / s.hidden_bytes) * 4 * rows * hid if s.hidden_bytes else 0.0
    beside = (work, Amount("dram", dram + spilled, device.dram_bytes_per_s))
    made = max(0, rows - ROWS * walk.early) / s.ctas if b.before else 0.0
    if made:  # the first product of the last rows, and the second, come behind
        front = Amount("rows in front", made * ROW_S * scaling.cycles(device))
        beside += (Counts("rows", (front, units("behind", 1, 1))),)
    streams = Counts("streams", beside, max)
    ours = START_S - H200.launch_s
    start = Amount("launch", START_S + (device.launch_s - H200.launch_s) + ours * (scaling.cycles(device) - 1.0))
    return Counts("tiled block", (start, streams))


def _arithmetic_s(ops: tuple[TileOp, ...], columns: int, device: Device) -> float:
    """Seconds of one CTA for ``ops`` on a tile of so many columns."""
    instructions = sum(OPS[op.kind].flops for op in ops)
    return ISSUE * ROWS * columns * instructions / (device.simt_flops / device.sms)
