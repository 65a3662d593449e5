"""Copies of matrices with columns of zeros behind their own, all by one kernel (``include/pad.cuh``)."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from functools import cache

import torch
from torch import Tensor

from tilestream.cuda import beside

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
        packed = parameters(read, [m.data_ptr() for m in made])
        raw = (ctypes.c_char * len(packed)).from_buffer_copy(packed)
        stream = torch.cuda.current_stream(made[0].device).cuda_stream
        _loaded(len(read), made[0].device.index or 0).launch((-(-rows // WARPS), 1), 32 * WARPS, stream, raw)
    return made


def text(matrices: int) -> str:
    """The source of the kernel that copies so many."""
    return f'#define MATRICES {matrices}\n#include "pad.cuh"\n'


def parameters(matrices: Sequence[Tensor], made: Sequence[int]) -> bytes:
    """``PadParams`` of matrices whose rows' elements are neighbours, and the addresses of their copies."""
    row_bytes = 2 * matrices[0].shape[1]
    each = (
        struct.pack("<QQqi4x", m.data_ptr(), at, 2 * m.stride(0), len(m)) for m, at in zip(matrices, made, strict=True)
    )
    return b"".join(each) + struct.pack("<2i", row_bytes, -(-row_bytes // PIECE))


@cache
def _loaded(matrices: int, device_index: int) -> beside.driver.Function:
    return beside.function(NAME, text(matrices), device_index)
