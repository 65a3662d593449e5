"""Copies of matrices with columns of zeros behind their own, all by one kernel (``include/pad.cuh``)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch import Tensor

from tilestream.cuda import beside
from tilestream.kernels.parts.params import Field, Struct, pointers

NAME = "tilestream_pad"
WARPS, PIECE = 8, 16
"""Warps of a CTA, a row each; bytes that a lane copies at once."""


def padded(matrices: Sequence[Tensor], columns: int) -> list[Tensor]:
    """Of each matrix [rows, k] its copy [rows, columns], contiguous, zeros behind its own columns.

    Args:
        matrices: of 16-bit elements and equal ``k``.
        columns: ``k`` rounded up to a multiple of 8.
    """
    made = [m.new_empty(len(m), columns) for m in matrices]
    rows = sum(map(len, matrices))
    if rows:
        read = [m if m.stride(1) == 1 else m.contiguous() for m in matrices]
        packed = parameters(read, made)
        stream = torch.cuda.current_stream(made[0].device).cuda_stream
        _loaded(len(read), made[0].device.index or 0).launch((-(-rows // WARPS), 1), 32 * WARPS, stream, packed)
    return made


def text(matrices: int) -> str:
    """The source of the kernel that copies so many."""
    return f'#define MATRICES {matrices}\n{argument(matrices).text}\n#include "pad.cuh"\n'


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
def argument(matrices: int) -> Struct:
    """``PadParams`` of so many matrices."""
    return Struct("PadParams", (Field(MATRIX, "matrices", matrices), Field("int", "row_bytes"), Field("int", "pieces")))


def parameters(
    matrices: Sequence[Tensor], made: Sequence[Tensor], address: Callable[[Tensor], int] = Tensor.data_ptr
) -> bytes:
    """The bytes of ``PadParams`` of matrices whose rows' elements are neighbours, and of their copies."""
    row_bytes = 2 * matrices[0].shape[1]
    each = [
        {"from": address(m), "to": address(at), "stride": 2 * m.stride(0), "rows": len(m)}
        for m, at in zip(matrices, made, strict=True)
    ]
    return argument(len(each)).pack(matrices=each, row_bytes=row_bytes, pieces=-(-row_bytes // PIECE))


@cache
def _loaded(matrices: int, device_index: int) -> beside.driver.Function:
    return beside.function(NAME, text(matrices), device_index)
