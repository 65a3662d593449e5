"""What kernels that share a tile of few rows over many CTAs reach: latencies and rates of their hand-overs.

`H200_SHARED_TILE` is from `benchmarks/results/ffn_variants.json`: a hand-written FFN of 128 rows on one H200 in 42
variants of five shapes (no cluster, clusters of 2 to 16, the middle through DSM or the L2, four tails, rings of several
depths). `benchmarks/fit/fit_shared_tile.py` fits what is marked so on the shapes G4 and G8 alone; G6, G5 and S2 judge
([docs/flashfuser.md](../../../../docs/flashfuser.md)). The memory's rates are the device's own; on other devices each
constant moves with the number that it hangs on (``on``), since nothing but an H200 was measured.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from tilestream.devices.device import Device
from tilestream.kernels.coefficients import scaling


@dataclass(frozen=True)
class Coefficients:
    """Seconds, bytes/s and shares, of an H200. They are what a regression made of the times of many kernels, each with
    all that goes along with it: four fits have four rates of an SM's port, whose own is ``Device.sm_bytes_per_s``."""

    gap_s: float = 1.2e-6
    """From the end of a launch to the first instruction of the next in a CUDA graph: clocks of G4."""
    flags_s: float = 1.8e-6
    """From C stored to the first part of the others' C back through the L2, a flag a CTA: clocks of G4."""
    first_s: float = 0.286e-6
    """Until operands flow, from the L2. Fitted."""
    first_dram_s: float = 0.421e-6
    """The same from DRAM, more by this. Fitted."""
    cluster_s: float = 0.754e-6
    """A launch of clusters, more by this. Fitted (clocks: first data 0.3 to 0.4 us later)."""
    lock_step: float = 0.170
    """Share that streaming takes longer where CTAs of a cluster wait for each other's slots. Fitted."""
    port_bytes_per_s: float = 97.9e9
    """What one SM takes in. Fitted (clocks of G4: 90)."""
    latency_s: float = 2.42e-6
    """From asking for a stage of a ring under load to having multiplied it: ring bytes / this bounds a CTA. Fitted."""
    step_s: float = 0.0
    """A stage of a ring, however little is in it. The hand-written kernels tell nothing of it."""
    skew: float = 0.0290
    """Share of the first product's time by which the last CTA of a group is behind. Fitted."""
    dsm_port_bytes_per_s: float = 19.9e9
    """What one SM takes in of its cluster's shared memories, all sending to all. Fitted (clocks: 16 to 19)."""
    dsm_step_s: float = 0.364e-6
    """Hand-over of one peer's part through DSM, divided by the slots that overlap. Fitted."""
    tail_s: float = 0.860e-6
    """Epilogue and last stores. Fitted."""
    tail_dsm_s: float = 0.331e-6
    """The same where E is summed through DSM in fp32. Fitted."""
    tail_partials_s: float = 0.0
    """The same where partial results are announced and awaited, more than ``tail_s`` by this."""
    before_s: float = 1.5e-6
    """Rows made in front of the first product, and exchanged. No variant of the fit has them; clocks of a block."""
    column_s: float = 0.0
    """A column of the middle that a CTA makes, where it exchanges none."""
    element_s: float = 0.0
    """An instruction of the epilogue of a column of the middle, of 64 rows: a warpgroup does one behind the other."""
    beside_s: float = 0.0
    """Where rows, a residual, are read beside the result: what whole blocks take more than their parts say."""
    own_s: float = 0.0
    """Rows that each CTA makes for itself in front of the first product. Measured of generated kernels alone."""
    own_column_s: float = 0.0
    """And a column of each row that a warp makes of them, one row behind the other."""
    add_bytes_per_s: float = 1.787e12
    """Bulk reduce-add of bf16 into the L2, all CTAs. Fitted."""
    partials_bytes_per_s: float = 3.127e12
    """fp32 partial sums written to the L2 and read back, all CTAs. Fitted."""
    atomics_bytes_per_s: float = 2.741e12
    """Vector atomics of fp32 into the L2, all CTAs. Fitted."""

    def on(self, device: Device) -> Coefficients:
        """The same on ``device``; exactly the same on an H200. Shares (``lock_step``, ``skew``) are of any device."""
        return _on(self, device)


HANGS_ON: Mapping[str, Callable[[Device], float]] = {
    "gap_s": scaling.launch,
    "first_s": scaling.launch,
    "first_dram_s": scaling.launch,
    "cluster_s": scaling.launch,
    "flags_s": scaling.hand_over,
    "tail_partials_s": scaling.hand_over,
    "before_s": scaling.hand_over,
    "port_bytes_per_s": scaling.port,
    "latency_s": scaling.load,
    "beside_s": scaling.load,
    "step_s": scaling.cycles,
    "tail_s": scaling.cycles,
    "own_s": scaling.cycles,
    "column_s": scaling.issue,
    "element_s": scaling.issue,
    "own_column_s": scaling.issue,
    "dsm_step_s": scaling.dsm,
    "tail_dsm_s": scaling.dsm,
    "dsm_port_bytes_per_s": scaling.dsm_port,
    "add_bytes_per_s": scaling.l2,
    "partials_bytes_per_s": scaling.l2,
    "atomics_bytes_per_s": scaling.l2,
}
"""What of a device each constant of ``Coefficients`` moves with."""


@lru_cache(maxsize=256)
def _on(rates: Coefficients, device: Device) -> Coefficients:
    return replace(rates, **{name: getattr(rates, name) * factor(device) for name, factor in HANGS_ON.items()})


H200_SHARED_TILE = Coefficients()
"""Of the hand-written kernels."""

H200_GENERATED = Coefficients(
    first_s=0.263e-6,
    first_dram_s=1.36e-6,
    cluster_s=0.352e-6,
    lock_step=0.235,
    port_bytes_per_s=253e9,
    latency_s=1.35e-6,
    step_s=0.238e-6,
    flags_s=0.937e-6,
    skew=0.187,
    tail_s=0.883e-6,
    tail_dsm_s=0.874e-6,
    tail_partials_s=1.06e-6,
    before_s=3.59e-6,
    element_s=1.08e-9,
    beside_s=1.40e-6,
    add_bytes_per_s=49.9e12,
    partials_bytes_per_s=19.5e12,
    dsm_step_s=0.513e-6,
    dsm_port_bytes_per_s=30.5e9,
)
"""Of generated kernels: fitted on kernels of G4, G8, S2 and two more shapes, of 1 to 512 rows, with and without a norm,
that exchange through the L2 and have no DSM but for sums; 7 % mean error over all shapes, those of no part in it
included (`studies/flashfuser/generated.py` holds it against `benchmarks/results/few_rows.json`). What a gather through
DSM takes is that of the collective alone, clusters of 2 to 16, parts of 1 to 32 KB (`benchmarks/run/collectives.py`).
Of epilogues, residuals and partial results: fitted with G4, G8, S2 on 38 kernels of the blocks of BERT, Qwen3-0.6B and
Llama-3.2-1B at 128 rows, all else kept; of BERT's the mean error was 16 % and is 4, of GPT-2's, which had no part in
it, 16 and 4."""

H200_MADE_BY_EACH = replace(
    H200_GENERATED,
    first_dram_s=0.09e-6,
    step_s=0.191e-6,
    lock_step=0.0,
    column_s=7.2e-9,
    element_s=0.0,
    port_bytes_per_s=400e9,
    tail_dsm_s=0.6e-6,
    dsm_port_bytes_per_s=15.2e9,
)
"""Of those whose CTAs exchange no middle, ``step_s`` of 128 columns: fitted on 23 kernels of G1, G3 and G10 at 128
rows, in clusters of 2 to 16, weights from DRAM; 4.4 % mean error over these, 11 % at most."""

H200_ONE_LAYER = Coefficients(
    first_s=0.28e-6,
    first_dram_s=1.36e-6,
    cluster_s=0.154e-6,
    lock_step=0.335,
    port_bytes_per_s=128e9,
    latency_s=1.09e-6,
    step_s=0.151e-6,
    tail_s=0.671e-6,
    tail_dsm_s=0.677e-6,
    tail_partials_s=1.07e-6,
    before_s=3.88e-6,
    own_s=1.0e-6,
    own_column_s=0.634e-9,
    dsm_port_bytes_per_s=24.3e9,
    add_bytes_per_s=49.9e12,
    partials_bytes_per_s=4.82e12,
)
"""Of generated kernels of one layer: fitted on five of eight layers of a first round of `benchmarks/run/projections.py`
at 1, 16 and 128 rows, weights from DRAM; 7 % mean error over these and over the others, 9 % over the next round's."""


def dsm_bytes_per_s(device: Device, size: int, rates: Coefficients = H200_SHARED_TILE) -> float:
    """What all clusters of ``size`` that are resident take in of their peers' memories together.

    It falls with the size because fewer CTAs are resident, as the paper's Fig. 4 falls; a port's rate was found the
    same for clusters of 4 to 16.

    Raises:
        DeviceError: the device has no clusters of this size.
    """
    return rates.on(device).dsm_port_bytes_per_s * size * device.resident_clusters(size)
