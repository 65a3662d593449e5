"""What a backward chain is predicted to take."""

from __future__ import annotations

from functools import partial
from math import ceil

from tilestream.devices import Device
from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS, Pipeline
from tilestream.ir.tileops import OPS
from tilestream.kernels.costs import Amount, Counts, hidden
from tilestream.kernels.gradients.layouts import GROUPS, Kind
from tilestream.kernels.gradients.model import builds

BESIDE = 0.55
"""Of what a CTA's work or its copies take, whichever is less, that hides behind the other where the ring holds the rows
of one step (wide chains; H200, 262,144 rows: five kernels within 12 %). Deeper rings hide all of it."""


def cost(pipeline: Pipeline, rows: int, device: Device) -> Counts:
    """A backward chain over ``rows`` rows: products, or the shared memory and the instructions between layers that they
    wait for; beside them what is read and written; then partial results through the L2, and one hand-over.

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
    shared_per_s = device.shared_bytes_per_clock * device.clock_hz
    lanes = (
        Amount("shared memory", steps * s.layout.step_bytes, shared_per_s),
        Amount("lanes", issued, device.simt_flops),
    )
    work = Counts("work", (Amount("tensor", flops, device.tensor_flops[s.dtype]), Counts("between", lanes)), max)
    streams = partial(hidden, share=BESIDE if s.layout.kind is Kind.WIDE else 1.0)
    return Counts(
        "backward chain",
        (
            Counts("streams", (work, Amount("dram", dram, device.dram_bytes_per_s)), streams),
            Amount("l2", 2 * s.workspace_bytes, device.l2_bytes_per_s),
            Amount("trip", device.queue_s(2048)),
            Amount("launch", device.launch_s + device.ramp_s),
        ),
    )
