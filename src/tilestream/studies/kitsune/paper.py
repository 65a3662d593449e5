"""What the Kitsune paper states about its evaluation, as data: Table 2 and every figure in the text.

Source: Davies, Crago, Sankaralingam, Keckler, arXiv 2502.18403v1, sections 1 and 6, and the abstract of the journal
version (ACM TACO 22(4) article 146). The paper gives no figure per application for its bar charts, no layer sizes and
no batch sizes; what stands here is all that can be held against a simulation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

INFERENCE, TRAINING = "inference", "training"


@dataclass(frozen=True)
class Table2Row:
    """One row of Table 2. Fused counts are operators; traffic is the reduction of off-chip bytes, in percent."""

    label: str
    app: str
    mode: str
    operators: int
    fused_vertical: int
    fused_kitsune: int
    traffic_vertical: float
    traffic_kitsune: float

    @property
    def key(self) -> str:
        return f"{self.app} {self.mode}"


COLUMNS = ("operators", "fused_vertical", "fused_kitsune", "traffic_vertical", "traffic_kitsune")
"""What ``Table2Row`` and our own rows have in common."""

TABLE2: tuple[Table2Row, ...] = (
    Table2Row("DLRM inf", "dlrm", INFERENCE, 21, 17, 17, 22.53, 44.27),
    Table2Row("GRC inf", "graphcast", INFERENCE, 35, 21, 29, 23.98, 57.20),
    Table2Row("MGN inf", "mgn", INFERENCE, 51, 36, 41, 56.54, 57.76),
    Table2Row("NERF inf", "nerf", INFERENCE, 24, 18, 24, 40.19, 98.58),
    Table2Row("LL-CTX", "llama_prefill", INFERENCE, 27, 10, 19, 10.04, 49.07),
    Table2Row("LL-TOK", "llama_decode", INFERENCE, 27, 10, 19, 0.01, 0.07),
    Table2Row("DLRM tr", "dlrm", TRAINING, 59, 18, 46, 7.86, 25.07),
    Table2Row("GRC tr", "graphcast", TRAINING, 101, 20, 76, 9.06, 40.06),
    Table2Row("MGN tr", "mgn", TRAINING, 148, 36, 108, 21.76, 40.26),
    Table2Row("NERF tr", "nerf", TRAINING, 69, 18, 56, 14.13, 45.47),
    Table2Row("LLAMA tr", "llama_prefill", TRAINING, 88, 10, 34, 2.85, 45.16),
)
"""In the order of the paper. ``app`` and ``mode`` are ours."""


NEAR_POINTS, NEAR_SHARE = 5.0, 0.1
"""How far from what is stated a figure is still called near: in points of a percentage, and as a share of a speedup."""


@dataclass(frozen=True)
class Figure:
    """A figure of the text: a value (``low == high``), a range, or a bound on one side.

    ``unit`` is ``x`` (times as fast), ``%`` or ``points``. ``source`` says where it is stated; ``ours`` of a figure
    that is a range over applications is the range of the same quantity.
    """

    key: str
    what: str
    low: float
    high: float
    unit: str
    source: str

    @property
    def stated(self) -> bool:
        """Whether the paper gives a number; else it only draws a bar, which nothing can agree with."""
        return not math.isnan(self.low)

    def text(self) -> str:
        """As the paper has it; ``bars only`` where no number could be read."""
        if not self.stated:
            return "bars only"
        return span_text(self.low, self.high, self.unit)

    def holds(self, low: float, high: float) -> bool:
        """Whether a value or range lies within what is stated; a stated value holds within its own rounding."""
        slack = (0.05 if self.unit == "x" else 0.5) if self.low == self.high else 0.0
        return low >= self.low - slack and high <= self.high + slack

    def nears(self, low: float, high: float) -> bool:
        """Whether it does, or is off by no more than ``NEAR_POINTS``, of a speedup by the share ``NEAR_SHARE``."""
        below, above = (NEAR_SHARE * abs(v) if self.unit == "x" else NEAR_POINTS for v in (self.low, self.high))
        return self.holds(low, high) or (low >= self.low - below and high <= self.high + above)


def span_text(low: float, high: float, unit: str) -> str:
    """``1.5x``, ``1.04 to 3.4x``, ``at least 50%`` or ``at most 2.8x``."""

    def number(value: float) -> str:
        if unit == "x":
            return f"{value:.2f}".rstrip("0").rstrip(".") if value < 10 else f"{value:.1f}"
        return f"{value:.2f}".rstrip("0").rstrip(".") if abs(value) < 1 else f"{value:.0f}"

    if low == high or number(low) == number(high):
        return f"{number(low)}{unit}"
    if math.isinf(high):
        return f"at least {number(low)}{unit}"
    if math.isinf(low):
        return f"at most {number(high)}{unit}"
    return f"{number(low)} to {number(high)}{unit}"


_NONE = math.inf

FIGURES: tuple[Figure, ...] = (
    # Speed, inference
    Figure("inference_regions", "inference: speedup of fused regions, least to most", 1.04, 3.4, "x", "6, Fig. 10"),
    Figure("inference_regions_geomean", "inference: speedup of fused regions, geomean", 1.9, 1.9, "x", "6, Fig. 10"),
    Figure("inference_geomean", "inference: end-to-end speedup, geomean", 1.5, 1.5, "x", "6, Fig. 11"),
    Figure("inference_range", "inference: end-to-end speedup, range", 1.3, 2.3, "x", "abstract of v1"),
    Figure("inference_most", "inference: end-to-end speedup, most", 2.8, 2.8, "x", "abstract of TACO"),
    Figure("nerf_inference", "inference: NeRF end to end", 2.3, 2.3, "x", "6"),
    Figure("nerf_inference_40gb", "inference: NeRF end to end, ours on an A100 of 40 GB", 2.3, 2.3, "x", "6"),
    Figure("llama_prefill_regions", "inference: Llama prefill, fused regions", 1.04, 1.08, "x", "6"),
    Figure("llama_prefill_share", "inference: Llama prefill, share of time in fused regions", 84, 84, "%", "6"),
    Figure("llama_prefill_e2e", "inference: Llama prefill end to end", 1.03, 1.07, "x", "the two rows above"),
    Figure("inference_share", "inference: share of time in fused regions, least", 50, _NONE, "%", "6"),
    Figure("vertical_geomean", "inference: vertical fusion end to end, geomean", 1.14, 1.14, "x", "6"),
    Figure("vertical_best", "inference: vertical fusion end to end, its best, MeshGraphNets", 1.4, 1.4, "x", "6"),
    # Speed, training
    Figure("training_range", "training: end-to-end speedup, range", 1.1, 2.2, "x", "6, Fig. 14"),
    Figure("training_most_v1", "training: end-to-end speedup, most", 2.4, 2.4, "x", "abstract of v1"),
    Figure("training_most", "training: end-to-end speedup, most", 2.2, 2.2, "x", "abstract of TACO"),
    Figure("backward_time", "training: time of backward over forward, bulk", 2.0, 2.0, "x", "6"),
    Figure("backward_share", "training: fused share of backward less that of forward", -_NONE, 0, "%", "6"),
    # Off-chip traffic
    Figure("inference_traffic", "inference: traffic reduction, range", 41, 98, "%", "abstract of v1"),
    Figure("inference_traffic_most", "inference: traffic reduction, most", 99, 99, "%", "abstract of TACO"),
    Figure("training_traffic", "training: traffic reduction, range", 16, 42, "%", "abstract of v1"),
    Figure("training_traffic_most", "training: traffic reduction, most", 45, 45, "%", "abstract of TACO"),
    # Utilisation: share of the run time with a resource below 33% of its peak
    Figure("low_motivation_inference", "bulk inference: SM and DRAM both low, per application", 20, 25, "%", "1"),
    Figure("low_motivation_training", "bulk training: SM and DRAM both low, per application", 37, 67, "%", "1"),
    Figure("low_dlrm_inference", "bulk inference: both low, DLRM", 77, 77, "%", "1"),
    Figure("low_dlrm_training", "bulk training: both low, DLRM", 89, 89, "%", "1"),
    Figure("low_llama_inference", "bulk inference: both low, Llama prefill", 0.1, 0.1, "%", "1"),
    Figure("low_llama_training", "bulk training: both low, Llama", 0.3, 0.3, "%", "1"),
    Figure("low_bulk_inference", "inference, bulk: both low, mean", 26, 26, "%", "6"),
    Figure("low_kitsune_inference", "inference, Kitsune: both low, mean", 15, 15, "%", "6"),
    Figure("low_bulk_training", "training, bulk: both low, mean", 44, 44, "%", "6"),
    Figure("low_kitsune_training", "training, Kitsune: both low, mean", 18, 18, "%", "6"),
    Figure("low_fall_inference", "inference: both low, bulk less Kitsune", 11, 11, " points", "6"),
    Figure("low_fall_training", "training: both low, bulk less Kitsune", 26, 26, " points", "6"),
    Figure("dram_low_bulk_training", "training, bulk: only DRAM low, mean", 23, 23, "%", "6"),
    Figure("dram_low_kitsune_training", "training, Kitsune: only DRAM low, mean", 50, 50, "%", "6"),
    # Sensitivity
    Figure("sms_kitsune_inference", "2x SMs and L2 bandwidth: Kitsune gains, inference", 47, 47, "%", "6, Fig. 12"),
    Figure("sms_kitsune_training", "2x SMs and L2 bandwidth: Kitsune gains, training", 27, 27, "%", "6, Fig. 12"),
    Figure("sms_bulk_inference", "2x SMs and L2 bandwidth: bulk gains, inference", 18, 26, "%", "6, Fig. 12"),
    Figure("sms_bulk_training", "2x SMs and L2 bandwidth: bulk gains, training", 18, 26, "%", "6, Fig. 12"),
)

_NAN = math.nan

UNREADABLE: tuple[Figure, ...] = tuple(
    Figure(f"{name}_{execution}_{mode}", f"{what}: {who} gains, {mode}", _NAN, _NAN, "%", "6, Figs. 10 and 12")
    for name, what, wanted in (
        ("dram", "2x DRAM bandwidth", ("bulk", "vertical", "kitsune")),
        ("both", "2x SMs, L2 and DRAM bandwidth", ("bulk", "vertical", "kitsune")),
        ("sms", "2x SMs and L2 bandwidth", ("vertical",)),
    )
    for execution, who in (("bulk", "bulk"), ("vertical", "vertical fusion"), ("kitsune", "Kitsune"))
    if execution in wanted
    for mode in (INFERENCE, TRAINING)
)
"""What the paper shows as bars only, which could not be read: ours stand alone."""
