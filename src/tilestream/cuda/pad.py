"""Copies of matrices with columns of zeros behind their own, all by one kernel (``include/pad.cuh``)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

from torch import Tensor

from tilestream.cuda.beside import Address, LaneCall, LaneKernel, launch, text_of
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


def padded(matrices: Sequence[Tensor], columns: int) -> list[Tensor]:
    """Of each matrix [rows, k] its copy [rows, columns], contiguous, zeros behind its own columns.

    Args:
        matrices: of 16-bit elements and equal ``k``.
        columns: ``k`` rounded up to a multiple of 8.
    """
    made = call(matrices, columns)
    if made.ctas:
        launch(made, matrices[0].device)
    return list(made.results)


def call(matrices: Sequence[Tensor], columns: int, address: Address = Tensor.data_ptr) -> LaneCall:
    """The launch of ``padded``."""
    made = [m.new_empty(len(m), columns) for m in matrices]
    read = [m if m.stride(1) == 1 else m.contiguous() for m in matrices]
    each = [
        {"from": address(m), "to": address(at), "stride": 2 * m.stride(0), "rows": len(m)}
        for m, at in zip(read, made, strict=True)
    ]
    row_bytes = 2 * matrices[0].shape[1]
    values = {"matrices": each, "row_bytes": row_bytes, "pieces": -(-row_bytes // PIECE)}
    return LaneCall(kernel(len(read)), -(-sum(map(len, matrices)) // WARPS), values, made, read)
