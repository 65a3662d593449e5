"""What each part of the design is worth, by the cost model: the paper's ablation, and one of the transports."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from statistics import geometric_mean, median
from typing import TypeVar

from tilestream.devices import Device
from tilestream.devices.shared_tile import H200_SHARED_TILE, SharedTileRates
from tilestream.studies.flashfuser.dataflow.chain import ACCUMULATOR, ELEMENT, Chain
from tilestream.studies.flashfuser.search.cost import cost
from tilestream.studies.flashfuser.search.enumerate import variants
from tilestream.studies.flashfuser.search.search import Candidate, rank
from tilestream.studies.flashfuser.search.variant import TILE, Middle, Tail

Key = TypeVar("Key", Middle, Tail)

SAMPLES = 101
"""Kernels drawn at random, always the same."""

SPLITS = (1, 2, 4, 8, 16)
"""Parts that a library may split the inner axis of a product into."""


@dataclass(frozen=True)
class Ablation:
    """Predicted microseconds of one chain.

    ``unfused``: two kernels. ``middles``: the best kernel by where C is exchanged. ``random``: the median of kernels
    drawn at random among those with a middle in DSM or none, which are the paper's. ``all``: the best for which there
    is a kernel; ``unbuilt``: the best of all, where there is none for it. ``tails``: the best by tail, C
    through the L2. ``shallow``: the best kernel's grid with the least rings. Arms without an exchange may be split-N
    with atomics, which has no kernel here.
    """

    chain: Chain
    unfused: float
    middles: dict[Middle, float]
    random: float
    tails: dict[Tail, float]
    shallow: float
    all: float
    unbuilt: Candidate | None = None

    @property
    def papers(self) -> float:
        """The best of the paper's own means: DSM, or no exchange."""
        return min(us for middle, us in self.middles.items() if middle is not Middle.L2)


def ablation(chain: Chain, device: Device) -> Ablation | None:
    """All arms of one chain; None if it has no kernel of the family."""
    ranked = rank(chain, device)
    if not any(c.variant.built for c in ranked):
        return None
    papers = [v for v in variants(chain, device) if v.middle is not Middle.L2]
    drawn = random.Random(0).choices(papers, k=SAMPLES)
    best = next(c for c in ranked if c.variant.built)
    least = replace(best.variant, stages=2, weight_stages=2)
    return Ablation(
        chain,
        unfused_us(chain, device),
        _best(ranked, lambda c: c.variant.middle),
        median(cost(chain, v, device).us for v in drawn),
        _best((c for c in ranked if c.variant.middle is Middle.L2), lambda c: c.variant.tail),
        cost(chain, least, device).us,
        best.predicted_us,
        None if ranked[0].variant.built else ranked[0],
    )


def unfused_us(chain: Chain, device: Device, rates: SharedTileRates = H200_SHARED_TILE) -> float:
    """Two kernels, the activation in the first one's epilogue: what a library's best pair would take.

    Each is a launch, then the longest of what streams, on all SMs, its inner axis split as far as pays (partial sums
    through the L2). Constants are those of the fused kernels: nothing was fitted on a library's times.
    """
    dram = chain.weight_bytes > device.l2_bytes
    rows = -(-chain.m // TILE) * TILE
    total = 0.0
    for inner, out in ((chain.k, chain.n * chain.branches), (chain.n, chain.l)):
        weights = ELEMENT * inner * out
        times = []
        for split in SPLITS:
            mine = ELEMENT * min(rows, TILE) * inner / split
            parts = (
                (mine + weights / device.sms * -(-rows // TILE)) / rates.port_bytes_per_s,
                (device.sms * mine + weights) / device.l2_shared_bytes_per_s,
                weights / device.dram_bytes_per_s if dram else 0.0,
                2 * rows * inner * out / device.tensor_flops["bf16"],
            )
            partial = 2 * ACCUMULATOR * split * rows * out / rates.partials_bytes_per_s if split > 1 else 0.0
            times.append(max(parts) + partial)
        total += rates.gap_s + rates.first_s + rates.first_dram_s * dram + min(times) + rates.tail_s
    return total * 1e6


def summary(made: list[Ablation]) -> dict[str, float]:
    """Geometric means of speedups over two kernels, by arm."""
    arms = {
        "all": [a.unfused / a.papers for a in made],
        "random": [a.unfused / a.random for a in made],
        "no DSM": [a.unfused / a.middles[Middle.NONE] for a in made if Middle.NONE in a.middles],
        "with L2": [a.unfused / a.all for a in made],
    }
    return {name: geometric_mean(values) for name, values in arms.items() if values}


def _best(candidates: Iterable[Candidate], key: Callable[[Candidate], Key]) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for c in candidates:
        found[key(c)] = min(c.predicted_us, found.get(key(c), float("inf")))
    return found
