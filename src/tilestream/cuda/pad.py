"""Copies of matrices with columns of zeros, launched (``kernels/operators/pad``)."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from tilestream.cuda.beside import Address, LaneCall, launch
from tilestream.kernels.operators.pad import PIECE, WARPS, kernel


def padded(matrices: Sequence[Tensor], columns: int) -> list[Tensor]:
    """Of each matrix [rows, k] its copy [rows, columns], contiguous, zeros behind its own columns.

    Args:
        matrices: of 16-bit elements and equal ``k``.
        columns: ``k`` rounded up to a multiple of 8.
    """
    return list(launch(call(matrices, columns), matrices[0].device))


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
