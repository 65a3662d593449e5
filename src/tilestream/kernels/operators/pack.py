"""The copy of odd-sized weights that runs before a kernel (``include/pack.cuh``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from tilestream.ir.pipeline import DTYPE_BYTES
from tilestream.kernels.operators.lanes import LaneKernel, text_of
from tilestream.kernels.parts.params import Field, Struct, Where, pointers
from tilestream.kernels.stream.model import ceil_to, columns_of
from tilestream.kernels.stream.tables import PackSpec

CTAS, WARPS = 16, 8
"""Of a piece of a weight; of a CTA."""

ENTRY = Struct(
    "PackEntry",
    (
        *pointers("source", type="const void*"),
        *pointers("target"),
        Field("int", "rows"),
        Field("int", "columns", note="of one segment, in elements; columns beyond are zero"),
        *(Field("int", name) for name in ("source_stride", "target_stride", "source_column", "target_column")),
        Field("int", "padded"),
        Field("int", "element_bytes"),
    ),
)


@cache
def kernel(entries: int) -> LaneKernel:
    """The kernel that copies as many pieces of weights."""
    argument = Struct("PackParams", (Field(ENTRY, "entries", entries),))
    return LaneKernel("tilestream_pack", text_of("pack.cuh", argument), argument, WARPS, second=entries)


def entries(specs: Sequence[PackSpec], where: Mapping[str, Where], at: Mapping[str, int]) -> list[dict[str, Any]]:
    """The pieces of the weights at ``where``, and where they go in the parts of a space ``at``."""
    return [
        {
            "source": where[spec.weight].address,
            "target": at[f"packed {k}"],
            "rows": spec.rows,
            "columns": columns,
            "source_stride": where[spec.weight].stride,
            "target_stride": spec.columns,
            "source_column": column,
            "target_column": target,
            "padded": ceil_to(columns, columns_of(spec.dtype)),
            "element_bytes": DTYPE_BYTES[spec.dtype],
        }
        for k, spec in enumerate(specs)
        for column, columns, target in spec.segments
    ]
