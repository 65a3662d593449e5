"""What a backward chain is predicted to take."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tilestream.devices import Device
from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS, Pipeline
from tilestream.schedule.backward import build
from tilestream.schedule.backward.model import GROUPS

SHARED_BYTES_PER_CLOCK = 128


@dataclass(frozen=True)
class ChainCost:
    """Seconds of one launch: what it must take, and what is predicted.

    Attributes:
        flops_s, dram_s, shared_s: of the products, of all that is read and written, of an SM's shared memory.
        exchange_s: partial results through the L2, and one hand-over.
    """

    flops_s: float
    dram_s: float
    shared_s: float
    exchange_s: float
    launch_s: float

    @property
    def floor_s(self) -> float:
        """No kernel is faster on this device."""
        return max(self.flops_s, self.dram_s)

    @property
    def total_s(self) -> float:
        return max(self.flops_s, self.dram_s, self.shared_s) + self.exchange_s + self.launch_s


def cost(pipeline: Pipeline, rows: int, device: Device) -> ChainCost:
    """Predicted time of a backward chain over ``rows`` rows.

    Raises:
        VerifyError: it is none.
    """
    s = build(pipeline)
    size = DTYPE_BYTES[s.dtype]
    moved = {name for names in s.streams for name in names} | ({s.chain.result} if s.chain.result else set())
    dram = rows * size * sum(pipeline.tensor(name).features for name in moved)
    flops = sum(2 * rows * layer.out * layer.k * (2 if layer.weight else 1) for layer in s.chain.layers)
    steps = ceil(ceil(rows / TILE_ROWS) / (GROUPS * s.splits))
    return ChainCost(
        flops / device.tensor_flops[s.dtype],
        dram / device.dram_bytes_per_s,
        steps * s.step_bytes / SHARED_BYTES_PER_CLOCK / device.clock_hz,
        2 * s.workspace_bytes / device.l2_bytes_per_s + device.queue_s(2048),
        device.launch_s + device.ramp_s,
    )
