"""Gradients of a norm's rows, weight and bias in one pass over the rows (``include/norm_gradients.cuh``)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

from tilestream.devices.h200 import H200
from tilestream.kernels.operators.lanes import LaneKernel, text_of
from tilestream.kernels.parts.params import Field, Struct, pointers

NAME = "tilestream_norm_gradients"
WARPS = 8
MOST_COLUMNS = 1024
"""A lane holds three values of each of its columns, 32 at most."""
RESIDENT = {6: 4, 12: 2, 32: 1}
"""CTAs of an SM, by the columns of a lane up to which they have the registers that they want."""

SMS = H200.sms
"""Microseconds on an H200, 1,024 rows of 768 in 33, 66, 132 and 264 CTAs: 6.0, 4.5, 3.8, 5.3; 12,608 of 192:
23.4, 12.7, 7.3, 5.9, and 5.9 in 528; 50,176 of 96: 102.8, 49.3, 26.8, 17.5, and 15.5 in 528."""

PARAMS = Struct(
    "NormGradientsParams",
    (
        *pointers("gradient", "x", type="const char*", notes={"gradient": "[rows, COLUMNS]", "x": "likewise"}),
        *pointers("weight", "beside", type="const char*", notes={"weight": "[COLUMNS]", "beside": "[rows, COLUMNS]"}),
        Field("char*", "out", note="[rows, COLUMNS]"),
        Field("float*", "sums", note="[CTAs, sums, COLUMNS]"),
        Field("int", "rows"),
        Field("float", "eps"),
    ),
)


@dataclass(frozen=True)
class NormGradients:
    """Of LayerNorm over so many columns, or of RMSNorm if it is not ``centred``; bf16 or f16.

    Attributes:
        weighted: whether the norm has a weight. beside: whether rows are added to those of the gradient.
    """

    columns: int
    dtype: str
    centred: bool
    weighted: bool
    beside: bool

    @property
    def taken(self) -> bool:
        """Whether there is a kernel."""
        return 0 < self.columns <= MOST_COLUMNS and self.columns % 2 == 0

    @property
    def sums(self) -> int:
        """Over rows: for the weight, and for the bias that a norm with means may have."""
        return 1 + self.centred

    def ctas(self, rows: int) -> int:
        """Those that share so many rows: as many as 132 SMs hold, while a warp has four rows of more than one SM's CTA
        has; each leaves sums for somebody to read."""
        return max(1, min(-(-rows // WARPS), max(SMS, min(SMS * self.resident, rows // (4 * WARPS)))))

    @property
    def resident(self) -> int:
        """CTAs of an SM."""
        return next(ctas for most, ctas in RESIDENT.items() if self.own <= most)

    @property
    def vector(self) -> int:
        """Columns that a lane has side by side: with which a lane has the fewest, and of these the most."""
        return min((v for v in (8, 4, 2) if self.columns % v == 0), key=self._own)

    @property
    def own(self) -> int:
        """Columns of a lane."""
        return self._own(self.vector)

    def _own(self, vector: int) -> int:
        return -(-self.columns // (32 * vector)) * vector


@cache
def kernel(norm: NormGradients) -> LaneKernel:
    """The kernel of a norm's gradients."""
    shape = {
        "DTYPE": norm.dtype, "COLUMNS": norm.columns, "VECTOR": norm.vector, "CENTRED": int(norm.centred),
        "WEIGHTED": int(norm.weighted), "BESIDE": int(norm.beside), "WARPS": WARPS,
        "RESIDENT": norm.resident,
    }  # fmt: skip
    text = text_of("norm_gradients.cuh", PARAMS, shape)
    return LaneKernel(NAME, text, PARAMS, WARPS, 4 * norm.sums * WARPS * norm.columns)
