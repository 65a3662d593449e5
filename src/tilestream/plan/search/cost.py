"""What a kernel that shares a tile takes: streaming of two products, and the latencies between.

FlashFuser's cost is the slowest memory level alone (``minmax``). That has no launch, no latency of an exchange, no
depth of a ring and no compute, and on an H200 those decide: it calls DSM and the L2 nearly equal where measurements
are up to twice apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from tilestream.devices import Device
from tilestream.devices.shared_tile import H200_SHARED_TILE, SharedTileRates
from tilestream.plan.dataflow.chain import ACCUMULATOR, ELEMENT, Chain
from tilestream.plan.search.variant import Middle, SharedTile, Tail


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
    def us(self) -> float:
        return (self.launch + self.product0 + self.exchange + self.product1 + self.tail) * 1e6


def cost(
    chain: Chain, v: SharedTile, device: Device, cold: bool = False, rates: SharedTileRates = H200_SHARED_TILE
) -> Phases:
    """Predicted phases of ``chain`` under ``v``.

    Args:
        cold: weights come from DRAM; they do in any case where they are larger than the L2.
    """
    t = _Terms(chain, v, device, cold or chain.weight_bytes > device.l2_bytes, rates)
    launch = rates.gap_s + rates.first_s + rates.first_dram_s * t.dram + rates.cluster_s * (v.multicast > 1)
    product0, limit0 = t.product(t.a, t.b, 0, t.b0)
    held = min(v.weight_ring(chain.branches), t.d)
    skew = rates.skew * product0
    if v.middle is Middle.NONE:
        exchange = 0.0
        product1, limit1 = t.product(0, t.d, held, t.d0)
    elif v.middle is Middle.L2:
        exchange = rates.flags_s + skew
        product1, limit1 = t.product(t.c, t.d, held, t.d0)
    else:
        exchange = rates.dsm_step_s * v.columns / max(1, v.slots) + skew
        parts = t.parts(0, t.d, held, t.d0)
        parts["DSM"] = t.c * (v.columns - 1) / v.columns / rates.dsm_port_bytes_per_s
        product1, limit1 = _together(parts)
    partial = v.groups * chain.m * chain.l
    if v.tail is Tail.ATOMICS:  # they run beside the second product, which makes all of E
        product1, limit1 = _together({limit1: product1, "atomics": partial * ACCUMULATOR / rates.atomics_bytes_per_s})
    tail = {
        Tail.STORE: rates.tail_s,
        Tail.ADD: rates.tail_s + partial * ELEMENT / rates.add_bytes_per_s,
        Tail.PARTIALS: rates.tail_s + 2 * partial * ACCUMULATOR / rates.partials_bytes_per_s,
        Tail.DSM: rates.tail_dsm_s,
        Tail.ATOMICS: rates.tail_s,
    }[v.tail]
    return Phases(launch, product0, exchange, product1, tail, (limit0, limit1))


class _Terms:
    """Bytes of a CTA: ``a`` and ``c`` of rows, ``b`` and ``d`` of weights; ``b0`` and ``d0`` of the chip's weights."""

    def __init__(self, chain: Chain, v: SharedTile, device: Device, dram: bool, rates: SharedTileRates) -> None:
        self.v, self.device, self.dram, self.rates, self.branches = v, device, dram, rates, chain.branches
        width = v.block_n * v.columns
        self.ctas = v.ctas(chain)
        self.a, self.b = v.rows * chain.k * ELEMENT, v.block_n * chain.k * ELEMENT * chain.branches
        self.c, self.d = v.rows * width * ELEMENT, v.block_l * width * ELEMENT
        if v.middle is Middle.NONE:
            self.d = chain.l * v.block_n * ELEMENT
        self.b0, self.d0 = ELEMENT * chain.n * chain.k * chain.branches, ELEMENT * chain.n * chain.l

    def product(self, rows: float, weights: float, held: float, chip: float) -> tuple[float, str]:
        seconds, limit = _together(self.parts(rows, weights, held, chip))
        return seconds * (1 + self.rates.lock_step * (self.v.multicast > 1)), limit

    def parts(self, rows: float, weights: float, held: float, chip: float) -> dict[str, float]:
        """Seconds of all that streams at once.

        Args:
            rows: bytes of A or C that a CTA loads; weights: of B or D, ``held`` of which its ring has already.
            chip: bytes of the weights that all CTAs together want.
        """
        v, d, r = self.v, self.device, self.rates
        left = max(0.0, weights - held)
        loaded = rows / (v.multicast if v.middle is Middle.L2 and v.tail is not Tail.DSM else 1)
        loaded = rows / v.multicast if v.middle is Middle.DSM else loaded
        weight_ring = v.weight_ring(self.branches)
        share = min(1.0, self.ctas / d.sms)
        return {
            "SM port": (rows + left) / r.port_bytes_per_s,
            "L2": self.ctas * (loaded + left) / d.l2_shared_bytes_per_s,
            "DRAM": max(0.0, chip - held * self.ctas) / d.dram_bytes_per_s if self.dram else 0.0,
            "ring of rows": max(0.0, rows - v.ring) / v.ring * r.latency_s if rows else 0.0,
            "ring of weights": max(0.0, left - weight_ring) / weight_ring * r.latency_s,
            "tensor cores": chip / ELEMENT * 2 * v.rows * self._tiles() / (d.tensor_flops["bf16"] * share),
        }

    def _tiles(self) -> int:
        return self.ctas // (self.v.groups * self.v.columns)


def _together(parts: dict[str, float]) -> tuple[float, str]:
    """A little more than the longest: what runs side by side still waits for each other at times."""
    total = sum(s**6 for s in parts.values()) ** (1 / 6)
    return total, max(parts, key=lambda name: parts[name])
