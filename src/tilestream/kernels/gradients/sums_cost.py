"""How long stationary sums take: what is streamed, what no load hides, and partial results through the L2."""

from __future__ import annotations

from math import ceil, prod

from tilestream.devices import Device
from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS, Pipeline
from tilestream.kernels.coefficients import scaling
from tilestream.kernels.costs import Amount, Counts, beside
from tilestream.kernels.gradients.layouts import GROUPS
from tilestream.kernels.gradients.model import Schedule, builds
from tilestream.kernels.stream.counts import WARPGROUP

PARTIAL_TRIPS = 2
"""Each partial result is written once and read once, through the L2."""
TRIP_S = 1.4e-6
"""Of partial results to the L2 or back, while all SMs send theirs. Fitted on 24 launches of plain networks, 1,024 to
262,144 rows (4 % mean error), and 6 % off on 18 launches of the applications' training steps."""
BYTES_OF_FOUR, SPLITS_AT_ONCE = 16, 16
"""That a thread of the kernels of the fit added, and had on their way. Those of today have a four of all splits on
their way, ``emit.width`` fours at once. By their number of trips the same launches are 1 % further off, and a sum of
256 x 256 over 262,144 rows, which takes 81.8 us, is 81.2 for 85.4: to count so, ``TRIP_S`` has to be fitted anew."""


def cost(pipeline: Pipeline, rows: int, device: Device) -> Counts:
    """A pipeline of stationary sums over ``rows`` rows: products hide behind loads, or loads behind products, as wgmma
    runs on while a ring fills; then partial results, and the trips that wait for each other.

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
    trips_s = device.queue_s(2048) + trips * TRIP_S * scaling.hand_over(device)
    memory = (
        Amount("dram", dram, device.dram_bytes_per_s),
        Amount("l2", l2, device.l2_shared_bytes_per_s),
    )
    own = Amount("own share", max(_multiply_s(s, tiles, device) for s in schedules))  # of the CTA with most to do
    later = Amount("sm port", max(0.0, longest - l2 / sum(s.ctas for s in schedules)), device.sm_bytes_per_s)
    streamed = Counts("streams", (Counts("loads", (Counts("memory", memory, beside), own), max), later))
    return Counts(
        "stationary sums",
        (
            Counts("products", (Amount("tensor", flops, rate), streamed), max),
            Counts("exchange", (Amount("l2", partials, device.l2_bytes_per_s), Amount("trips", trips_s))),
            Amount("launch", device.launch_s + device.ramp_s),
        ),
    )


def _multiply_s(s: Schedule, tiles: int, device: Device) -> float:
    """Seconds of the tensor cores for a CTA's own share of the rows, padding included."""
    return ceil(tiles / s.splits) * 2 * TILE_ROWS * prod(s.block) / (device.tensor_flops[s.dtype] / device.sms)


def _turns(s: Schedule) -> int:
    """How often a thread waited for partial results in the kernels of the fit: of the fours of its CTA's part, for
    those of some splits at a time."""
    fours = ceil(s.partial_bytes / BYTES_OF_FOUR / s.splits)
    return ceil(fours / (GROUPS * WARPGROUP)) * ceil(s.splits / SPLITS_AT_ONCE)
