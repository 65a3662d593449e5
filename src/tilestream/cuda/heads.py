"""Heads of an attention as a kernel of warpgroups asks for them: by bulk copies, out of wherever they lie."""

from __future__ import annotations

from torch import Tensor

from tilestream.cuda.beside import Address
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.parts.tensor_maps import HeadsMap

LOG2_E = 1.4426950408889634


def by_copies(t: Tensor) -> Tensor:
    """Rows, heads and batches that start on 16 bytes: the tensor, or a copy."""
    size = t.element_size()
    odd = [n for n in t.stride()[:3] if n * size % 16 or n == 0]
    return t.contiguous().clone() if t.stride(3) != 1 or odd or t.data_ptr() % 16 else t


def heads_map(t: Tensor, rows: int, address: Address) -> HeadsMap:
    """Boxes of so many rows of heads [batches, heads, rows, features] that start on 16 bytes."""
    size = t.element_size()
    sizes = (t.shape[3], t.shape[2], t.shape[1], t.shape[0])
    strides = (t.stride(2) * size, t.stride(1) * size, t.stride(0) * size)
    return HeadsMap(DTYPES[t.dtype], address(t), sizes, strides, rows)
