"""What CTAs that share a tile of few rows take: streaming of two products, and the latencies between.

One model for all that is such a kernel: schedules of ours (``shared_tile_cost``), and the family that FlashFuser's
study searches. The paper's own cost is the slowest memory level alone. That has no launch, no latency of an exchange,
no depth of a ring and no compute, and on an H200 those decide.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from tilestream.devices import Device
from tilestream.devices.shared_tile import H200_SHARED_TILE, SharedTileRates

ELEMENT = 2
ACCUMULATOR = 4


class Middle(StrEnum):
    """Where CTAs of a group exchange the middle: nowhere (each has all it needs), the L2 with a flag a CTA, or DSM."""

    NONE = "none"
    L2 = "l2"
    DSM = "dsm"


class Tail(StrEnum):
    """How the groups' partial results become the result.

    ``STORE``: there is one group. ``ADD``: bulk reduce-add into memory, in the result's dtype and any order.
    ``PARTIALS``: fp32 through the L2, added in order. ``DSM``: reduce-scatter of fp32 over a cluster, in order.
    ``ATOMICS``: fp32 vector atomics and a cast, what split-N without an exchange does; no kernel here.
    """

    STORE = "store"
    ADD = "add"
    PARTIALS = "partials"
    DSM = "dsm"
    ATOMICS = "atomics"


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


@dataclass(frozen=True)
class Phases:
    """Seconds of one launch, from the end of the one before; ``limits`` says what bounds each product."""

    launch: float
    product0: float
    exchange: float
    product1: float
    tail: float
    limits: tuple[str, str]

    @property
    def total_s(self) -> float:
        return self.launch + self.product0 + self.exchange + self.product1 + self.tail

    @property
    def us(self) -> float:
        return self.total_s * 1e6


def phases(w: Sharing, device: Device, cold: bool, rates: SharedTileRates = H200_SHARED_TILE) -> Phases:
    """Predicted phases of a launch.

    Args:
        cold: weights come from DRAM; they do in any case where they are larger than the L2.
        rates: of an H200; they are taken to ``device``.
    """
    rates = rates.on(device)
    dram = cold or w.first_chip_bytes + w.second_chip_bytes > device.l2_bytes
    launch = rates.gap_s + rates.first_s + rates.first_dram_s * dram + rates.cluster_s * (w.cluster > 1)
    before = rates.own_s + rates.own_column_s * w.own_columns if w.own_columns else rates.before_s * w.before
    launch += before
    # What is in front gives weights time to come: as much as they stream at, or their ring holds.
    stream = min(rates.port_bytes_per_s, (device.dram_bytes_per_s if dram else device.l2_shared_bytes_per_s) / w.ctas)
    held0 = min(w.weight_ring, w.first_bytes, before * stream)
    parts = _parts(w, w.input_bytes, w.first_bytes, held0, w.first_chip_bytes, device, dram, rates)
    parts["stages"] = w.first_steps * rates.step_s
    product0, limit0 = _together(parts)
    product0 *= 1 + rates.lock_step * (w.cluster > 1)
    exchange = rates.column_s * w.made_columns
    if w.middle is Middle.L2:
        exchange = rates.flags_s + rates.skew * product0
    elif w.middle is Middle.DSM:
        exchange = rates.dsm_step_s * w.columns / max(1, w.slots) + rates.skew * product0
    exchange += rates.element_s * w.middle_work
    held = min(w.weight_ring, w.second_bytes)
    through_l2 = w.middle_bytes if w.middle is Middle.L2 else 0.0
    parts = _parts(w, through_l2, w.second_bytes, held, w.second_chip_bytes, device, dram, rates)
    parts["stages"] = w.second_steps * rates.step_s
    if w.middle is Middle.DSM:
        parts["DSM"] = w.middle_bytes * (w.columns - 1) / w.columns / rates.dsm_port_bytes_per_s
    product1, limit1 = _together(parts)
    if w.middle is not Middle.DSM:
        product1 *= 1 + rates.lock_step * (w.cluster > 1)
    partial = w.groups * w.result
    if w.tail is Tail.ATOMICS:  # they run beside the second product, which makes all of the result
        product1, limit1 = _together({limit1: product1, "atomics": partial * ACCUMULATOR / rates.atomics_bytes_per_s})
    after = {
        Tail.STORE: rates.tail_s,
        Tail.ADD: rates.tail_s + partial * ELEMENT / rates.add_bytes_per_s,
        Tail.PARTIALS: rates.tail_s + rates.tail_partials_s + 2 * partial * ACCUMULATOR / rates.partials_bytes_per_s,
        Tail.DSM: rates.tail_dsm_s + w.scatter_bytes / rates.dsm_port_bytes_per_s,
        Tail.ATOMICS: rates.tail_s,
    }[w.tail]
    return Phases(launch, product0, exchange, product1, after + rates.beside_s * w.beside, (limit0, limit1))


def _parts(
    w: Sharing, rows: float, weights: float, held: float, chip: float, device: Device, dram: bool, r: SharedTileRates
) -> dict[str, float]:
    """Seconds of all that streams at once.

    Args:
        rows: bytes of rows that a CTA loads; weights: of weights, ``held`` of which its ring has already.
        chip: bytes of the weights that all CTAs together want.
    """
    left = max(0.0, weights - held)
    share = min(1.0, w.ctas / device.sms)
    return {
        "SM port": (rows + left) / r.port_bytes_per_s,
        "L2": w.ctas * (rows / w.multicast + left) / device.l2_shared_bytes_per_s,
        "DRAM": max(0.0, chip - held * w.ctas) / device.dram_bytes_per_s if dram else 0.0,
        "ring of rows": max(0.0, rows - w.left_ring) / w.left_ring * r.latency_s if rows else 0.0,
        "ring of weights": max(0.0, left - w.weight_ring) / w.weight_ring * r.latency_s,
        "tensor cores": chip / ELEMENT * 2 * w.rows * w.row_tiles / (device.tensor_flops["bf16"] * share),
    }


def _together(parts: dict[str, float]) -> tuple[float, str]:
    """A little more than the longest: what runs side by side still waits for each other at times."""
    total = sum(s**6 for s in parts.values()) ** (1 / 6)
    return total, max(parts, key=lambda name: parts[name])
