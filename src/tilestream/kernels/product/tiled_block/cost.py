"""How long a tiled block takes: units a cluster, pages a unit, and what no product covers."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tilestream.devices import Device, fitted
from tilestream.devices.h200 import H200
from tilestream.ir.pipeline import TileOp
from tilestream.ir.tileops import OPS
from tilestream.kernels.product.tiled_block.model import CLUSTER, COLUMNS, DEPTH, ROWS, TiledBlock

SHARE = 0.84
"""Of the tensor cores' rate while pages flow, at the power limit. This and the next two are fitted to six blocks on an
H200 (``fitted_us`` of benchmarks/results/tiled_blocks.json): 3 % off on average, 5 % at most."""
BETWEEN_S = 0.2e-6
"""Between two sums, besides the arithmetic of an epilogue."""
ISSUE = 1.4
"""Of an epilogue's arithmetic, times what the lanes need for its instructions."""
START_S = 6.0e-6
"""Launch, barriers and the first pages; rows that are made in front of the first product. Of it ``launch_s`` is the
device's, and the rest are cycles."""


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
    page = max(_product_s(s, device), _page_s(s, device))
    firsts, seconds = (ceil(n / s.clusters) for n in (walk.all_firsts, walk.all_seconds))
    products = page * (firsts * s.first_steps + seconds * s.second_steps)
    between = BETWEEN_S * fitted.cycles(device)
    hidden_s = between + _arithmetic_s(s.block.middle, s.hidden_columns, device)
    result_s = between + _arithmetic_s(s.block.lasts[0].after, COLUMNS, device)
    epilogues = firsts * hidden_s + seconds * result_s
    beside = sum(op.kind == "load" for op in s.block.after)
    moved = 2 * (rows * (k + out * (1 + beside)) + hid * (k * len(s.block.firsts) + out))
    spilled = max(0.0, 1 - device.l2_bytes / s.hidden_bytes) * 4 * rows * hid if s.hidden_bytes else 0.0
    dram = (moved + spilled) / device.dram_bytes_per_s
    return TiledBlockCost(products, epilogues, dram, start_s(device) + max(products + epilogues, dram))


def start_s(device: Device) -> float:
    """Seconds until products run; ``START_S`` on an H200."""
    return START_S + (device.launch_s - H200.launch_s) + (START_S - H200.launch_s) * (fitted.cycles(device) - 1.0)


def _product_s(s: TiledBlock, device: Device) -> float:
    """Seconds of the tensor cores of one CTA for a page."""
    return 2.0 * ROWS * COLUMNS * DEPTH / (device.tensor_flops[s.block.dtype] / device.sms) / SHARE


def _page_s(s: TiledBlock, device: Device) -> float:
    """Seconds until a page is there, half of the columns by the other CTA of the cluster: at the SM's port, and at its
    share of the L2. On an H200 products take longer."""
    moved = 2 * DEPTH * (ROWS + COLUMNS / CLUSTER)
    return max(moved / device.sm_bytes_per_s, moved * s.ctas / device.l2_shared_bytes_per_s)


def _arithmetic_s(ops: tuple[TileOp, ...], columns: int, device: Device) -> float:
    """Seconds of one CTA for ``ops`` on a tile of so many columns."""
    instructions = sum(OPS[op.kind].flops for op in ops)
    return ISSUE * ROWS * columns * instructions / (device.simt_flops / device.sms)
