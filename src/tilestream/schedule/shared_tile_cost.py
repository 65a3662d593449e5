"""How long a shared tile takes: two phases of loads, the exchange between them, and a tail."""

from __future__ import annotations

from dataclasses import dataclass

from tilestream.devices import Device
from tilestream.schedule.shared_tile import SharedTile, Tail

EXCHANGE_S = 1.3e-6
"""From the last sum of the middle to its first columns from other CTAs: store, flag, poll, load. This and what follows
is fitted on ``benchmarks/results/few_rows.json``: 104 kernels on an H200, cold, 6 % mean error."""
SKEW = 0.18
"""Share of the loads' time by which the slowest CTA is later than the others: all wait for it."""
TAIL_S = {Tail.NONE: 0.5e-6, Tail.REDUCE_ADD: 1.0e-6, Tail.PARTIALS: 1.7e-6, Tail.CLUSTER: 1.7e-6}
"""From the last sum to the end of the kernel, besides the bytes of partial results."""


@dataclass(frozen=True)
class SharedTileCost:
    """Seconds of a launch by part; ``dram_s`` overlaps both phases."""

    first_s: float
    second_s: float
    exchange_s: float
    tail_s: float
    dram_s: float
    total_s: float

    @property
    def limit(self) -> str:
        parts = {"dram": self.dram_s, "loads": self.first_s + self.second_s, "exchange": self.exchange_s}
        parts["tail"] = self.tail_s
        return max(parts, key=lambda k: parts[k])


def shared_tile_cost(s: SharedTile, rows: int, device: Device) -> SharedTileCost:
    """One call at ``rows`` rows: as many launches as the row tiles of one do not hold."""
    k, hid, out = s.block.sizes
    firsts = len(s.block.firsts)
    port = device.sm_bytes_per_s
    height = min(rows, s.tile_rows)
    first = 2 * k * (height + firsts * s.middle_columns) / port
    second = 2 * s.group_columns * (height + s.out_columns) / port
    weights = 2 * hid * (firsts * k + out)
    dram = (weights + 2 * rows * (k + out)) / device.dram_bytes_per_s
    partial = s.ctas * height * s.out_columns * (8 if s.tail is Tail.PARTIALS else 2 if s.groups > 1 else 0)
    tail = TAIL_S[s.tail] + partial / device.l2_bytes_per_s
    loads = max(first + second, dram)
    launches = -(-rows // (s.row_tiles * s.tile_rows))
    total = launches * (device.launch_s + (1 + SKEW) * loads + EXCHANGE_S + tail)
    return SharedTileCost(first, second, EXCHANGE_S, tail, dram, total)
