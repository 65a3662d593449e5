"""What each number of a device may be: wide enough for any machine that one may want to imagine, and no wider.

Beyond these, formulas divide by nothing, tables outgrow memory, or a run takes minutes: 16,384 SMs plan a NeRF in five
seconds.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Range:
    """From ``least`` to ``most``, both permitted; whole numbers alone where ``whole``."""

    least: float
    most: float
    whole: bool = False

    def holds(self, value: object) -> bool:
        """Whether ``value`` is a number, no boolean and no NaN, within the range."""
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            return False
        return self.least <= value <= self.most and not (self.whole and value != int(value))

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        return f"{kind} from {_short(self.least)} to {_short(self.most)}"


SECONDS = Range(1e-10, 1.0)
RATE = Range(1e6, 1e21)
"""Bytes, operations or FLOPs a second."""
CYCLES = Range(1e-3, 1e6)
BYTES = Range(1024, 1e18, whole=True)

RANGES: Mapping[str, Range] = {
    "sms": Range(1, 16_384, whole=True),
    "clock_hz": Range(1e6, 1e13),
    "shared_bytes_per_cta": BYTES,
    "registers_per_cta": Range(16_384, 2**30, whole=True),
    "l2_bytes": BYTES,
    "dram_bytes": BYTES,
    "dram_bytes_per_s": RATE,
    "l2_bytes_per_s": RATE,
    "l2_shared_bytes_per_s": RATE,
    "simt_flops": RATE,
    "sfu_ops_per_s": RATE,
    "launch_s": SECONDS,
    "burst": Range(1e-3, 1e3),
    "issue_cycles": CYCLES,
    "code_cache": Range(1, 1e12),
    "cold_code": Range(1e-6, 1e3),
    "code_held": Range(1, 1e12),
    "code_bytes_per_s": RATE,
    "barrier_cycles": CYCLES,
    "load_s": SECONDS,
    "again_s": SECONDS,
    "page_s": SECONDS,
    "ramp_s": SECONDS,
    "queue_exposed": Range(1e-6, 1.0),
    "turnaround_s": SECONDS,
    "hand_over_s": SECONDS,
    "handoff_ops": Range(1e-3, 1e6),
    "registers_per_sm": Range(32_768, 2**30, whole=True),
    "shared_bytes_per_sm": BYTES,
    "ctas_per_sm": Range(1, 1024, whole=True),
    "sm_bytes_per_clock": Range(1e-3, 1e9),
    "shared_bytes_per_clock": Range(1e-3, 1e9),
    "dsm_bytes_per_s": RATE,
    "arbiters": Range(1, 2, whole=True),
}
"""By field of ``Device``. The registers of an SM hold at least a CTA of a library's kernel."""

TENSOR_FLOPS = RATE
"""Of each dtype."""
PAYLOAD = Range(1, 1e12)
"""Bytes at a point of a curve, whose seconds are ``SECONDS``."""
CLUSTER = Range(2, 1024, whole=True)
RESIDENT = Range(1, 16_384, whole=True)
CAPABILITY = Range(0, 99, whole=True)


def _short(value: float) -> str:
    return f"{value:,.0f}" if 1 <= abs(value) < 1e7 else f"{value:g}"
