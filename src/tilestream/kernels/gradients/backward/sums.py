"""C++ of what becomes of a backward chain's sums when the rows are over."""

from __future__ import annotations

from math import ceil

from tilestream.kernels.gradients.backward import Layer
from tilestream.kernels.gradients.backward.model import Held

MOST_FOURS = 42
"""Six threads each: of 132 CTAs' sums, 22 loads under way in each."""


def write(h: Held, layer: Layer, pointer: int, group: int = 0) -> str:
    """Where a four of sums goes, of a warpgroup's 64 rows; such lines are tried in order."""
    first = h.first + 128 * h.blocks * group
    at = f", {64 * group}, {64 * h.chunk}" if h.groups > 1 or h.chunk else ""
    if h.is_bias:
        row = f", {64 * group}" if h.groups > 1 else ""
        call = f"write_bias<{h.dtype}, {layer.out}{row}>(p.pointers[{pointer}], four - {first}, v)"
    else:
        turned = "true" if h.turned else "false"
        call = (
            f"write_weight<{h.dtype}, {turned}, {layer.out}, {layer.k}{at}>(p.pointers[{pointer}],"
            f" p.strides[{pointer}], four - {first}, v)"
        )
    return f"if (four < {first + 128 * h.blocks}) return {call};"


def width(fours: int, ctas: int) -> int:
    """Fours of sums that a CTA adds at once: all of its part, where few enough threads are left to each."""
    mine = ceil(fours / ctas)
    return ceil(mine / ceil(mine / MOST_FOURS))
