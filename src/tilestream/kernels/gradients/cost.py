"""How long gradients take: what is streamed, what no load hides, and partial results through the L2."""

from __future__ import annotations

from functools import partial
from math import ceil, prod

from tilestream.devices import Device
from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS, Pipeline
from tilestream.ir.tileops import OPS
from tilestream.kernels.coefficients import scaling
from tilestream.kernels.costs import Amount, Counts, beside, hidden
from tilestream.kernels.gradients.layouts import GROUPS, Kind
from tilestream.kernels.gradients.model import Schedule, builds, is_chain
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

BESIDE = 0.55
"""Of what a CTA's work or its copies take, whichever is less, that hides behind the other where the ring holds the rows
of one step (wide chains; H200, 262,144 rows: five kernels within 12 %). Deeper rings hide all of it."""


def cost(pipeline: Pipeline, rows: int, device: Device) -> Counts:
    """A launch of gradients over ``rows`` rows: a backward chain, or sums alone.

    Raises:
        VerifyError: it is neither.
    """
    return (chain_cost if is_chain(pipeline) else sums_cost)(pipeline, rows, device)


def sums_cost(pipeline: Pipeline, rows: int, device: Device) -> Counts:
    """Stationary sums over ``rows`` rows: products hide behind loads, or loads behind products, as wgmma
    runs on while a ring fills; then partial results, and the trips that wait for each other."""
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
    memory = (Amount("dram", dram, device.dram_bytes_per_s), Amount("l2", l2, device.l2_shared_bytes_per_s))
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


def chain_cost(pipeline: Pipeline, rows: int, device: Device) -> Counts:
    """A backward chain over ``rows`` rows: products, or the shared memory and the instructions between layers that they
    wait for; beside them what is read and written; then partial results through the L2, and one hand-over."""
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
