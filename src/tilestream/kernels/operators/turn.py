"""Copies of weights that lie transposed, which kernels read by rows (``include/turn.cuh``): one launch for many."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from tilestream.ir.pipeline import DTYPE_BYTES, Tensor
from tilestream.kernels.operators.lanes import LaneKernel, text_of
from tilestream.kernels.parts.params import Field, Struct, Where

ENTRIES = 16
"""Weights that one launch turns: the entries are the kernel's argument."""
BLOCKS, WARPS = 64, 8
"""Of a weight: one a square of 32 x 32, up to 256 x 256; of a CTA."""

ENTRY = Struct(
    "TurnEntry",
    (
        Field("const void*", "source", note="element (r, c) of the matrix that is wanted is at c * stride + r,"),
        Field("void*", "target", note="and goes to r * columns + c"),
        *(Field("int", name) for name in ("rows", "columns", "stride", "element_bytes")),
    ),
)
PARAMS = Struct("TurnParams", (Field(ENTRY, "entries", ENTRIES),))
UNUSED = dict.fromkeys((field.name for field in ENTRY.fields), 0)


@cache
def kernel(weights: int) -> LaneKernel:
    """The kernel that turns so many, at most ``ENTRIES``."""
    return LaneKernel("tilestream_turn", text_of("turn.cuh", PARAMS), PARAMS, WARPS, second=weights)


def entries(weights: Sequence[Tensor], where: Mapping[str, Where], targets: Sequence[int]) -> list[dict[str, Any]]:
    """The weights at ``where``, the distance of their columns in elements, and the addresses that they go to."""
    made = [
        {
            "source": where[w.name].address,
            "target": target,
            "rows": w.shape[0],
            "columns": w.shape[1],
            "stride": where[w.name].stride,
            "element_bytes": DTYPE_BYTES[w.dtype],
        }
        for w, target in zip(weights, targets, strict=True)
    ]
    return made + [UNUSED] * (ENTRIES - len(made))
