"""How long a tiled block takes: units a cluster, pages a unit, and what no product covers."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tilestream.devices import Device
from tilestream.schedule.tiled_block import COLUMNS, DEPTH, ROWS, TiledBlock

SHARE = 0.85
"""Of the tensor cores' rate while pages flow: what waits for the L2, and for the other CTA of the pair, is the rest."""
HIDDEN_S = 1.5e-6
"""A unit of the first product, besides its pages: the epilogue that nothing covers, and the start of the next sum."""
RESULT_S = 2.0e-6
"""The same of the second, whose whole epilogue comes between two sums."""
START_S = 6.0e-6
"""Launch, barriers and the first pages; rows that are made in front of the first product."""


@dataclass(frozen=True)
class TiledBlockCost:
    """Seconds. ``products_s`` and ``dram_s`` run side by side; ``epilogues_s`` is what lies between sums."""

    products_s: float
    epilogues_s: float
    dram_s: float
    total_s: float

    @property
    def limit(self) -> str:
        parts = {"tensor": self.products_s, "epilogue": self.epilogues_s, "dram": self.dram_s}
        return max(parts, key=lambda k: parts[k])


def tiled_block_cost(s: TiledBlock, rows: int, device: Device) -> TiledBlockCost:
    """One launch on ``rows`` rows. What the ring of the hidden layer has beyond the L2 goes to DRAM and back."""
    walk = s.walk(rows)
    k, hid, out = s.block.sizes
    page = 2.0 * ROWS * COLUMNS * DEPTH / (device.tensor_flops[s.block.dtype] / device.sms) / SHARE
    firsts, seconds = (ceil(n / s.clusters) for n in (walk.all_firsts, walk.all_seconds))
    products = page * (firsts * s.first_steps + seconds * s.second_steps)
    epilogues = firsts * HIDDEN_S + seconds * RESULT_S
    beside = sum(op.kind == "load" for op in s.block.after)
    moved = 2 * (rows * (k + out * (1 + beside)) + hid * (k * len(s.block.firsts) + out))
    spilled = max(0.0, 1 - device.l2_bytes / s.hidden_bytes) * 4 * rows * hid
    dram = (moved + spilled) / device.dram_bytes_per_s
    return TiledBlockCost(products, epilogues, dram, START_S + max(products + epilogues, dram))
