"""The copy of odd-sized weights that runs before a kernel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tilestream.cuda import beside, driver
from tilestream.ir.pipeline import DTYPE_BYTES
from tilestream.kernels.parts.params import Field, Struct, Where, pointers
from tilestream.kernels.stream.model import ceil_to, columns_of
from tilestream.kernels.stream.tables import PackSpec

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


def argument(entries: int) -> Struct:
    """``PackParams`` for as many pieces of weights."""
    return Struct("PackParams", (Field(ENTRY, "entries", entries),))


def text_of(entries: int) -> str:
    """The kernel that copies as many pieces of weights."""
    return beside.text_of("pack.cuh", argument(entries))


class Packer:
    """Fills the packed copies of ``specs`` from the weights, on the given stream."""

    def __init__(self, specs: Sequence[PackSpec], device: torch.device) -> None:
        self.specs = specs
        self.entries = [(k, s, seg) for k, s in enumerate(specs) for seg in s.segments]
        self.function = beside.function("tilestream_pack", text_of(len(self.entries)), device.index or 0)

    def prepare(self, where: Mapping[str, Where], at: Mapping[str, int], stream: int) -> driver.PreparedLaunch:
        """The copy from the weights at ``where`` to the parts of a space ``at``, on a stream."""
        entries = [
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
            for k, spec, (column, columns, target) in self.entries
        ]
        params = argument(len(entries)).pack(entries=entries)
        return self.function.prepare((16, len(entries)), 256, stream, params)
