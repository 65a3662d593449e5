"""Tensor maps as a kernel's argument asks for them; the driver encodes them, or the host build for its copy engine."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple


class MatrixMap(NamedTuple):
    """Boxes of ``box_rows`` x 128 bytes of a matrix, 128-byte swizzle, zero fill outside.

    Boxes of ``box_columns`` columns, where that is given, are swizzled only where they are 128 bytes wide.
    ``address`` and ``row_bytes`` are multiples of 16.
    """

    dtype: str
    address: int
    columns: int
    rows: int
    row_bytes: int
    box_rows: int
    box_columns: int = 0


class PixelMap(NamedTuple):
    """Boxes of ``pixels`` x 128 bytes of pictures, channels last, in the im2col mode: 128-byte swizzle.

    Args:
        sizes: channels, width, height, images. Pixels have a multiple of 16 bytes.
        begin, end: (x, y) of the first output pixel beside a picture's first, and of the last beside its last: at most
            127 away, -128 the other way. The last step's pixel is ``end``.
        strides: (x, y) from one output pixel to the next, at most 8.
    """

    dtype: str
    address: int
    sizes: tuple[int, int, int, int]
    begin: tuple[int, int]
    end: tuple[int, int]
    strides: tuple[int, int]
    pixels: int


class HeadsMap(NamedTuple):
    """Boxes of ``box_rows`` x 128 bytes of a head of a batch, 128-byte swizzle, zero fill outside of the head.

    Args:
        sizes: features, rows, heads, batches.
        strides: bytes from row to row, head to head, batch to batch; like ``address`` multiples of 16.
    """

    dtype: str
    address: int
    sizes: tuple[int, int, int, int]
    strides: tuple[int, int, int]
    box_rows: int


AnyMap = MatrixMap | PixelMap | HeadsMap
Encode = Callable[[AnyMap], bytes]
"""The bytes of a map."""
