"""Tensor maps as the host's copy engine reads them (``TensorMap`` of machine.h)."""

from __future__ import annotations

import struct

from tilestream.ir.pipeline import DTYPE_BYTES
from tilestream.kernels.parts.params import MAP_BYTES
from tilestream.kernels.parts.tensor_maps import AnyMap, HeadsMap, MatrixMap

WORDS = MAP_BYTES // 8
SWIZZLED_BYTES = 128  # of a row of a box
FORMATS = {"f16": 1, "tf32": 2}
"""The last word: how results are added in memory, or that fp32 is rounded on the way in; 0 of any other dtype."""


def encoded(m: AnyMap) -> bytes:
    """As ``driver.encoded``."""
    size, width = DTYPE_BYTES["f32" if m.dtype == "tf32" else m.dtype], SWIZZLED_BYTES
    if isinstance(m, MatrixMap):
        width = m.box_columns * size or width
        told = (m.address, m.columns, m.rows, m.row_bytes, m.box_rows, size)
    elif isinstance(m, HeadsMap):
        row, *others = m.strides
        told = (m.address, *m.sizes[:2], row, m.box_rows, size, 2, *others)
    else:
        channels, across, height, images = m.sizes
        told = (m.address, channels, across, height, m.pixels, size, 1, images, *m.begin, *m.end, *m.strides)
    last = (width, FORMATS.get(m.dtype, 0))
    return struct.pack(f"<{WORDS}q", *told, *[0] * (WORDS - len(told) - len(last)), *last)
