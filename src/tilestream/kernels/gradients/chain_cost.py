"""What a backward chain is predicted to take."""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from tilestream.devices import Device
from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS, Pipeline
from tilestream.ir.tileops import OPS
from tilestream.kernels.gradients.layouts import GROUPS, Kind
from tilestream.kernels.gradients.model import builds

BESIDE = 0.55
"""Of what a CTA's work or its copies take, whichever is less, that hides behind the other where the ring holds the rows
of one step (wide chains; H200, 262,144 rows: five kernels within 12 %). Deeper rings hide all of it."""


@dataclass(frozen=True)
class ChainCost:
    """Seconds of one launch: what it must take, and what is predicted.

    Attributes:
        flops_s, dram_s, shared_s: of the products, of all that is read and written, of an SM's shared memory.
        lanes_s: elementwise instructions between layers, which products of the same warps wait for.
        exchange_s: partial results through the L2, and one hand-over.
        hidden: the part of the shorter of copies and work that hides behind the longer.
    """

    flops_s: float
    dram_s: float
    shared_s: float
    lanes_s: float
    exchange_s: float
    launch_s: float
    hidden: float = 1.0

    @property
    def floor_s(self) -> float:
        """No kernel is faster on this device."""
        return max(self.flops_s, self.dram_s)

    @property
    def total_s(self) -> float:
        work = max(self.flops_s, self.shared_s + self.lanes_s)
        beside = (1 - self.hidden) * min(work, self.dram_s)
        return max(work, self.dram_s) + beside + self.exchange_s + self.launch_s


def cost(pipeline: Pipeline, rows: int, device: Device) -> ChainCost:
    """Predicted time of a backward chain over ``rows`` rows.

    Raises:
        VerifyError: it is none.
    """
    (s,) = builds(pipeline)
    size = DTYPE_BYTES[s.dtype]
    moved = {*s.streams} | ({s.chain.result} if s.chain.result else set())
    dram = rows * size * sum(pipeline.tensor(name).features for name in moved)
    flops = sum(2 * rows * layer.out * layer.k * (2 if layer.weight else 1) for layer in s.chain.layers)
    issued = sum(rows * layer.k * OPS[op.kind].flops for layer in s.chain.layers for op in (*layer.makes, *layer.ops))
    steps = ceil(ceil(rows / TILE_ROWS) / (GROUPS * s.splits))
    return ChainCost(
        flops / device.tensor_flops[s.dtype],
        dram / device.dram_bytes_per_s,
        steps * s.layout.step_bytes / device.shared_bytes_per_clock / device.clock_hz,
        issued / device.simt_flops,
        2 * s.workspace_bytes / device.l2_bytes_per_s + device.queue_s(2048),
        device.launch_s + device.ramp_s,
        BESIDE if s.layout.kind is Kind.WIDE else 1.0,
    )
