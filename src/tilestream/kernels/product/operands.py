"""A product's operands in one launch: addresses and maps of its part of the rows, maps of its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline
from tilestream.kernels.parts.source import Call
from tilestream.kernels.parts.tensor_maps import MatrixMap
from tilestream.kernels.product.block import Block


@dataclass(frozen=True)
class Operands:
    """Where the tensors of ``pipeline`` are in ``call``."""

    call: Call
    pipeline: Pipeline

    def rows(self, name: str) -> tuple[int, int, int]:
        """Address of the part's first row, and elements and bytes from row to row."""
        address, stride, _ = self.call.where[name]
        size = DTYPE_BYTES[self.pipeline.tensor(name).dtype]
        return address + self.call.part.first * stride * size, stride, stride * size

    def matrix(self, name: str, columns: int, box_rows: int) -> bytes:
        """The map of the part's rows of a tensor."""
        (address, _, pitch), dtype = self.rows(name), self.pipeline.tensor(name).dtype
        return self.call.encode(MatrixMap(dtype, address, columns, self.call.part.rows, pitch, box_rows))

    def weights(self, b: Block, first_rows: int, last_rows: Sequence[int], depth: int) -> dict[str, list[bytes]]:
        """Maps of the products' weights, of which copies have so many rows; of those by columns ``depth``."""
        k, hid, _ = b.sizes

        def weight(name: str, columns: int, rows: int, box_rows: int) -> bytes:
            address, stride, _ = self.call.where[name]
            row_bytes = stride * DTYPE_BYTES[b.dtype]
            if b.by_columns:
                columns, rows, box_rows = rows, columns, depth
            return self.call.encode(MatrixMap(b.dtype, address, columns, rows, row_bytes, box_rows))

        firsts = [weight(f.weight, k, self.pipeline.tensor(f.weight).shape[0], first_rows) for f in b.firsts]
        wide = zip(b.lasts, last_rows, strict=True)
        lasts = [weight(x.weight, hid, last.columns, n) for last, n in wide for x in last.products]
        return {**({"firsts": firsts} if firsts else {}), "lasts": lasts}
