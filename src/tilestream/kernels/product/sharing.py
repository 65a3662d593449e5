"""What CTAs that share a tile of few rows take: streaming of two products, and the latencies between.

One model for all that is such a kernel: schedules of ours (``shared_tile_cost``), and the family that FlashFuser's
study searches. The paper's own cost is the slowest memory level alone. That has no launch, no latency of an exchange,
no depth of a ring and no compute, and on an H200 those decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import partial

from tilestream.devices import Device
from tilestream.kernels.coefficients.shared_tile import H200_SHARED_TILE, Coefficients
from tilestream.kernels.costs import Amount, Counts, Together, shared

ELEMENT = 2
ACCUMULATOR = 4


class Middle(StrEnum):
    """Where CTAs of a group exchange the middle: nowhere (each has all it needs), the L2 with a flag a CTA, or DSM."""

    NONE = "none"
    L2 = "l2"
    DSM = "dsm"


class Tail(StrEnum):
    """How partial results of the groups become the result."""

    NONE = "none"
    """There is one group."""
    PARTIALS = "partials"
    """fp32 partial results through the L2; each group adds a part of the tile, always in the same order."""
    REDUCE_ADD = "reduce-add"
    """Bulk reduce-add into global memory, in the result's dtype and in any order."""
    CLUSTER = "cluster"
    """fp32 reduce-scatter through distributed shared memory, in order; the groups are a cluster."""
    ATOMICS = "atomics"
    """fp32 vector atomics and a cast, what split-N without an exchange does; no kernel here."""


@dataclass(frozen=True)
class Sharing:
    """What one launch moves. Bytes are of a CTA unless said otherwise.

    Attributes:
        rows, row_tiles: rows of a tile as they are multiplied, and tiles side by side.
        groups, columns: ``groups`` of ``columns`` CTAs a tile.
        input_bytes, middle_bytes: rows that a CTA loads for the first and for the second product.
        first_bytes, second_bytes: weights of either.
        first_chip_bytes, second_chip_bytes: weights of either, of all CTAs together.
        result: elements of the result, of all rows.
        first_steps, second_steps: ring stages that a CTA takes for either product.
        left_ring, weight_ring: bytes under way at most, of rows and of weights.
        cluster: CTAs of a cluster; ``multicast`` of them load rows once for all.
        slots: parts of the middle that a CTA can receive at once through DSM.
        before: whether what the first product reads is made in the launch, and exchanged.
        own_columns: columns that a warp makes of it where each CTA does for itself; 0 where it is exchanged.
        made_columns: of the middle, of all first products, where a CTA exchanges none.
        middle_work: instructions of the epilogue of the middle: columns of a warpgroup times those of an element.
        beside: whether rows, a residual, are read beside the result.
        scatter_bytes: of fp32 partial sums that a CTA sends through DSM, where that is more than latency.
    """

    rows: int
    row_tiles: int
    groups: int
    columns: int
    input_bytes: float
    first_bytes: float
    middle_bytes: float
    second_bytes: float
    first_chip_bytes: float
    second_chip_bytes: float
    result: int
    first_steps: int
    second_steps: int
    left_ring: float
    weight_ring: float
    middle: Middle
    tail: Tail
    cluster: int = 1
    multicast: int = 1
    slots: int = 0
    before: bool = False
    own_columns: int = 0
    made_columns: int = 0
    middle_work: float = 0.0
    beside: bool = False
    scatter_bytes: float = 0.0

    @property
    def ctas(self) -> int:
        return self.row_tiles * self.groups * self.columns


def phases(w: Sharing, device: Device, cold: bool, rates: Coefficients = H200_SHARED_TILE) -> Counts:
    """A launch from the end of the one before, in five parts: ``launch``, ``product0``, ``exchange``, ``product1`` and
    ``tail``.

    Args:
        cold: weights come from DRAM; they do in any case where they are larger than the L2.
        rates: of an H200; they are taken to ``device``.
    """
    rates = rates.on(device)
    dram = cold or w.first_chip_bytes + w.second_chip_bytes > device.l2_bytes
    launch = rates.gap_s + rates.first_s + rates.first_dram_s * dram + rates.cluster_s * (w.cluster > 1)
    before = rates.own_s + rates.own_column_s * w.own_columns if w.own_columns else rates.before_s * w.before
    # What is in front gives weights time to come: as much as they stream at, or their ring holds.
    stream = min(rates.port_bytes_per_s, (device.dram_bytes_per_s if dram else device.l2_shared_bytes_per_s) / w.ctas)
    held = (min(w.weight_ring, w.first_bytes, before * stream), min(w.weight_ring, w.second_bytes))
    through_l2 = w.middle_bytes if w.middle is Middle.L2 else 0.0
    first = _streams(w, w.input_bytes, w.first_bytes, held[0], w.first_chip_bytes, device, dram, rates)
    second = _streams(w, through_l2, w.second_bytes, held[1], w.second_chip_bytes, device, dram, rates)
    first += (Amount("stages", w.first_steps * rates.step_s),)
    second += (Amount("stages", w.second_steps * rates.step_s),)
    if w.middle is Middle.DSM:
        received = w.middle_bytes * (w.columns - 1) / w.columns
        second += (Amount("DSM", received, rates.dsm_port_bytes_per_s),)
    lock = 1 + rates.lock_step * (w.cluster > 1)
    product0 = Counts("product0", first, streamed, lock)
    product1 = Counts("product1", second, streamed, 1.0 if w.middle is Middle.DSM else lock)
    partial = w.groups * w.result
    if w.tail is Tail.ATOMICS:  # they run beside the second product, which makes all of the result
        atomics = Amount("atomics", partial * ACCUMULATOR, rates.atomics_bytes_per_s)
        product1 = Counts("product1", (product1, atomics), streamed)
    arrived = {
        Middle.NONE: rates.column_s * w.made_columns,
        Middle.L2: rates.flags_s,
        Middle.DSM: rates.dsm_step_s * w.columns / max(1, w.slots),
    }[w.middle]
    behind = Counts("skew", (product0,), times=rates.skew if w.middle is not Middle.NONE else 0.0)
    epilogue = Amount("epilogue", rates.element_s * w.middle_work)
    after = {
        Tail.REDUCE_ADD: Amount("reduce-add", partial * ELEMENT, rates.add_bytes_per_s),
        Tail.PARTIALS: Amount("partial sums", 2 * partial * ACCUMULATOR, rates.partials_bytes_per_s),
        Tail.CLUSTER: Amount("DSM", w.scatter_bytes, rates.dsm_port_bytes_per_s),
    }.get(w.tail, Amount("store", 0.0))
    stored = rates.tail_dsm_s if w.tail is Tail.CLUSTER else rates.tail_s
    stored += rates.tail_partials_s if w.tail is Tail.PARTIALS else 0.0
    return Counts(
        "shared tile",
        (
            Amount("launch", launch + before),
            product0,
            Counts("exchange", (Amount("arrival", arrived), behind, epilogue)),
            product1,
            Counts("tail", (Amount("tail", stored), after, Amount("residual", rates.beside_s * w.beside))),
        ),
    )


def _streams(
    w: Sharing, rows: float, weights: float, held: float, chip: float, device: Device, dram: bool, r: Coefficients
) -> tuple[Amount, ...]:
    """All that streams at once.

    Args:
        rows: bytes of rows that a CTA loads; weights: of weights, ``held`` of which its ring has already.
        chip: bytes of the weights that all CTAs together want.
    """
    left = max(0.0, weights - held)
    share = min(1.0, w.ctas / device.sms)
    ring_s = max(0.0, rows - w.left_ring) / w.left_ring * r.latency_s if rows else 0.0
    return (
        Amount("SM port", rows + left, r.port_bytes_per_s),
        Amount("L2", w.ctas * (rows / w.multicast + left), device.l2_shared_bytes_per_s),
        Amount("DRAM", max(0.0, chip - held * w.ctas) if dram else 0.0, device.dram_bytes_per_s),
        Amount("ring of rows", ring_s),
        Amount("ring of weights", max(0.0, left - w.weight_ring) / w.weight_ring * r.latency_s),
        Amount("tensor cores", chip / ELEMENT * 2 * w.rows * w.row_tiles, device.tensor_flops["bf16"] * share),
    )


streamed: Together = partial(shared, power=6)
"""What runs side by side still waits for each other at times. The power was there before the fits, which are by it."""
