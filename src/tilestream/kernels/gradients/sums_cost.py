"""How long stationary sums take: what is streamed, what no load hides, and partial results through the L2."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil, prod

from tilestream.devices import Device, fitted
from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS, Pipeline
from tilestream.kernels.costs import overlapped
from tilestream.kernels.gradients.layouts import GROUPS
from tilestream.kernels.gradients.model import Schedule, builds
from tilestream.kernels.stream.counts import WARPGROUP

PARTIAL_TRIPS = 2
"""Each partial result is written once and read once, through the L2."""
TRIP_S = 1.4e-6
"""Of partial results to the L2 or back, while all SMs send theirs. Fitted on 24 launches of plain networks, 1,024 to
262,144 rows (4 % mean error), and 6 % off on 18 launches of the applications' training steps."""
BYTES_OF_FOUR, SPLITS_AT_ONCE = 16, 16  # that a thread added, and had on their way, in the kernels of the fit


@dataclass(frozen=True)
class GradientCost:
    """Seconds of one launch: what it must take, and what is predicted.

    Attributes:
        flops_s, dram_s, l2_s: of the products, of inputs read once, of what all CTAs read, at device rates.
        longest_s: of the CTA with most to do, its tensor cores; ``tail_s``: that it reads longer than the mean one.
        exchange_s: partial results through the L2, and the trips that wait for each other.
    """

    flops_s: float
    dram_s: float
    l2_s: float
    longest_s: float
    tail_s: float
    exchange_s: float
    launch_s: float

    @property
    def floor_s(self) -> float:
        """No kernel is faster on this device."""
        return max(self.flops_s, self.dram_s)

    @property
    def total_s(self) -> float:
        """Products hide behind loads, or loads behind products: wgmma runs on while a ring fills."""
        streamed = max(overlapped(self.dram_s, self.l2_s), self.longest_s) + self.tail_s
        return max(self.flops_s, streamed) + self.exchange_s + self.launch_s


def cost(pipeline: Pipeline, rows: int, device: Device) -> GradientCost:
    """Predicted time of a pipeline of stationary sums over ``rows`` rows.

    Raises:
        VerifyError: it is none.
    """
    schedules = builds(pipeline)
    tiles = ceil(rows / TILE_ROWS)
    layers = [layer for s in schedules for layer in s.chain.layers]
    flops = sum(2 * rows * layer.out * layer.k for layer in layers)
    rate = min(device.tensor_flops[s.dtype] for s in schedules)
    tensors = {t.name: t for t in pipeline.tensors}
    read = {name for s in schedules for name in s.streams}
    dram = sum(rows * tensors[n].features * DTYPE_BYTES[tensors[n].dtype] for n in read)
    l2 = sum(s.layout.slot_bytes * tiles * prod(s.parts) for s in schedules)
    longest = max(s.layout.slot_bytes * ceil(tiles / s.splits) for s in schedules)
    partials = PARTIAL_TRIPS * sum(s.workspace_bytes for s in schedules)
    trips = 1 + max(map(_turns, schedules))
    return GradientCost(
        flops / rate,
        dram / device.dram_bytes_per_s,
        l2 / device.l2_shared_bytes_per_s,
        max(_multiply_s(s, tiles, device) for s in schedules),
        max(0.0, longest - l2 / sum(s.ctas for s in schedules)) / device.sm_bytes_per_s,
        partials / device.l2_bytes_per_s + device.queue_s(2048) + trips * TRIP_S * fitted.hand_over(device),
        device.launch_s + device.ramp_s,
    )


def _multiply_s(s: Schedule, tiles: int, device: Device) -> float:
    """Seconds of the tensor cores for a CTA's own share of the rows, padding included."""
    return ceil(tiles / s.splits) * 2 * TILE_ROWS * prod(s.block) / (device.tensor_flops[s.dtype] / device.sms)


def _turns(s: Schedule) -> int:
    """How often a thread waits for partial results: of the fours of its CTA's part, those of some splits at a time."""
    fours = ceil(s.partial_bytes / BYTES_OF_FOUR / s.splits)
    return ceil(fours / (GROUPS * WARPGROUP)) * ceil(s.splits / SPLITS_AT_ONCE)
