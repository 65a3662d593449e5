"""Tensor maps as the host's copy engine reads them (``TensorMap`` of machine.h)."""

from __future__ import annotations

import struct

from tilestream.ir.pipeline import DTYPE_BYTES
from tilestream.kernels.parts.params import MAP_BYTES
from tilestream.kernels.parts.tensor_maps import Maps

WORDS = MAP_BYTES // 8
SWIZZLED_BYTES = 128  # of a row of a box
FORMATS = {"f16": 1, "tf32": 2}
"""The last word: how results are added in memory, or that fp32 is rounded on the way in; 0 of any other dtype."""


def tensor_map(
    dtype: str, address: int, columns: int, rows: int, row_bytes: int, box_rows: int, box_columns: int = 0
) -> bytes:
    """As ``driver.tensor_map``."""
    size = _element_bytes(dtype)
    width = box_columns * size or SWIZZLED_BYTES
    return _words((address, columns, rows, row_bytes, box_rows, size), width, dtype)


def pixel_map(
    dtype: str,
    address: int,
    sizes: tuple[int, int, int, int],
    begin: tuple[int, int],
    end: tuple[int, int],
    strides: tuple[int, int],
    pixels: int,
) -> bytes:
    """As ``driver.pixel_map``."""
    channels, width, height, images = sizes
    told = (address, channels, width, height, pixels, _element_bytes(dtype), 1, images, *begin, *end, *strides)
    return _words(told, SWIZZLED_BYTES, dtype)


MAPS = Maps(tensor_map, pixel_map)


def _words(told: tuple[int, ...], box_row_bytes: int, dtype: str) -> bytes:
    last = (box_row_bytes, FORMATS.get(dtype, 0))
    return struct.pack(f"<{WORDS}q", *told, *[0] * (WORDS - len(told) - len(last)), *last)


def _element_bytes(dtype: str) -> int:
    return DTYPE_BYTES["f32" if dtype == "tf32" else dtype]
