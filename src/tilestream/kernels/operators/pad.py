"""Copies of matrices with columns of zeros behind their own, all by one kernel (``include/pad.cuh``)."""

from __future__ import annotations

from functools import cache

from tilestream.kernels.operators.lanes import LaneKernel, text_of
from tilestream.kernels.parts.params import Field, Struct, pointers

NAME = "tilestream_pad"
WARPS, PIECE = 8, 16
"""Warps of a CTA, a row each; bytes that a lane copies at once."""


MATRIX = Struct(
    "PadMatrix",
    (
        *pointers("from", type="const char*"),
        Field("char*", "to", note="[rows, pieces] of 16 bytes"),
        Field("long long", "stride", note="bytes from row to row"),
        Field("int", "rows"),
    ),
)


@cache
def kernel(matrices: int) -> LaneKernel:
    """The kernel that copies so many."""
    argument = Struct(
        "PadParams", (Field(MATRIX, "matrices", matrices), Field("int", "row_bytes"), Field("int", "pieces"))
    )
    return LaneKernel(NAME, text_of("pad.cuh", argument, {"MATRICES": matrices}), argument, WARPS)
