"""What each part of the design is worth, by the cost model: the paper's ablation, and one of the transports."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import geometric_mean, median
from typing import TypeVar

from tilestream.devices import Device
from tilestream.kernels.coefficients.shared_tile import H200_SHARED_TILE, Coefficients
from tilestream.kernels.product.shared_tile import Tail
from tilestream.kernels.product.sharing import Middle
from tilestream.studies.flashfuser.dataflow.chain import ACCUMULATOR, ELEMENT, Chain
from tilestream.studies.flashfuser.search.kernels import Search

Key = TypeVar("Key", Middle, Tail)

SAMPLES = 101
"""Kernels drawn at random, always the same."""

TILE = 128
"""Rows of a library's tile."""

SPLITS = (1, 2, 4, 8, 16)
"""Parts that a library may split the inner axis of a product into."""


@dataclass(frozen=True)
class Ablation:
    """Predicted microseconds of one chain, weights from DRAM.

    ``unfused``: two kernels. ``all``: the best kernel. Of kernels that share a tile ``middles``: the best by where C is
    exchanged; ``tails``: the best by how partial results are added, C through the L2; ``random``: the median of kernels
    drawn at random among those with a middle in DSM or none, which are the paper's; None where there are none.
    """

    chain: Chain
    unfused: float
    middles: dict[Middle, float]
    random: float | None
    tails: dict[Tail, float]
    all: float

    @property
    def papers(self) -> float | None:
        """The best of the paper's own means: DSM, or no exchange."""
        return min((us for middle, us in self.middles.items() if middle is not Middle.L2), default=None)


def ablation(found: Search, device: Device) -> Ablation:
    """All arms of one chain, of what its search found."""
    shared = [(k.split, k.predicted_us) for k in found.kernels if k.split is not None]
    papers = [us for split, us in shared if split.middle is not Middle.L2]
    return Ablation(
        found.chain,
        unfused_us(found.chain, device, cold=True),
        _best((split.middle, us) for split, us in shared),
        median(random.Random(0).choices(papers, k=SAMPLES)) if papers else None,
        _best((split.tail, us) for split, us in shared if split.middle is Middle.L2),
        found.best.predicted_us,
    )


def unfused_us(chain: Chain, device: Device, cold: bool = False, rates: Coefficients = H200_SHARED_TILE) -> float:
    """Two kernels, the activation in the first one's epilogue: what a library's best pair would take.

    Each is a launch, then the longest of what streams, on all SMs, its inner axis split as far as pays (partial sums
    through the L2). Constants are those of the fused kernels: nothing was fitted on a library's times.
    """
    dram = cold or chain.weight_bytes > device.l2_bytes
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
        "all": [a.unfused / a.papers for a in made if a.papers is not None],
        "random": [a.unfused / a.random for a in made if a.random is not None],
        "no DSM": [a.unfused / a.middles[Middle.NONE] for a in made if Middle.NONE in a.middles],
        "with L2": [a.unfused / a.all for a in made],
    }
    return {name: geometric_mean(values) for name, values in arms.items() if values}


def _best(times: Iterable[tuple[Key, float]]) -> dict[Key, float]:
    found: dict[Key, float] = {}
    for key, us in times:
        found[key] = min(us, found.get(key, float("inf")))
    return found
