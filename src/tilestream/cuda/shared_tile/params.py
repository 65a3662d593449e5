"""The argument of a shared tile's kernel, as its template declares it."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from tilestream.cuda.driver import MAP_BYTES
from tilestream.cuda.pack import Where
from tilestream.cuda.shared_tile.emit import SharedTileSource
from tilestream.cuda.workspace import LINE_BYTES
from tilestream.ir.pipeline import DTYPE_BYTES
from tilestream.schedule.model import ceil_to
from tilestream.schedule.shared_tile import SharedTile, Tail
from tilestream.schedule.shared_tile.model import PANEL
from tilestream.schedule.sharing import Middle

TIMEOUT_NS = 1_000_000_000  # less than the barriers' own bound, so that who waited for whom is known

PHASES = 4
"""Flags a CTA: result cleared, middle there, partial result there, rows of the operand there (``enum Phase`` of
collectives.cuh)."""


class MakeMap(Protocol):
    """``driver.tensor_map``, or what the host build reads as one."""

    def __call__(
        self, dtype: str, address: int, columns: int, rows: int, row_bytes: int, box_rows: int, box_columns: int = 0, /
    ) -> bytes: ...


@dataclass(frozen=True)
class Space:
    """Device memory of a shared tile besides its tensors. Bytes, each part behind the one before.

    The flags are zero at first. The middle, where it goes through the L2, is ``[row tiles x groups x tile rows, columns
    of a group]`` in the products' dtype; partial results are ``[row tiles, columns, groups, rows x columns of a CTA]``
    in fp32, of as many rows as warps have. Where something stands in front of the first layer, what it makes is the
    operand, ``[row tiles x tile rows, k]``.
    """

    flags: int
    middle: int
    partial: int
    operand: int

    @staticmethod
    def of(s: SharedTile) -> Space:
        through_l2 = s.middle is Middle.L2 and not s.block.one_layer
        middle = s.row_tiles * s.groups * s.tile_rows * s.group_columns * 2 if through_l2 else 0
        partial = s.ctas * s.live_threads * s.out_columns * 2 if s.tail is Tail.PARTIALS else 0
        operand = s.row_tiles * s.tile_rows * s.block.sizes[0] * 2 if s.block.before else 0
        return Space(PHASES * s.ctas * LINE_BYTES, ceil_to(middle, LINE_BYTES), ceil_to(partial, LINE_BYTES), operand)

    @property
    def total(self) -> int:
        return self.flags + self.middle + self.partial + self.operand


def params(
    source: SharedTileSource, where: Mapping[str, Where], space: int, dump: int, tensor_map: MakeMap,
    first: int, rows: int, timeout_ns: int = TIMEOUT_NS,
) -> bytes:  # fmt: skip
    """The bytes of ``Params`` for ``rows`` rows from row ``first`` on of the tensors at ``where``.

    Args:
        space: address of ``Space.of(source.schedule)``.
        dump: address of the record that an expired wait leaves.
    """
    s, b = source.schedule, source.schedule.block
    types = {t.name: t.dtype for t in source.pipeline.tensors}
    sizes = Space.of(s)
    middle = space + sizes.flags
    partial = middle + sizes.middle
    operand = partial + sizes.partial
    k, hid, out = b.sizes

    def from_row(name: str) -> tuple[int, int, int]:
        """Address, elements and bytes from row to row."""
        address, stride, _ = where[name]
        return address + first * stride * DTYPE_BYTES[types[name]], stride, stride * DTYPE_BYTES[types[name]]

    def weight(name: str, columns: int, box: int) -> bytes:
        address, stride, _ = where[name]
        return tensor_map(b.dtype, address, columns, source.pipeline.tensor(name).shape[0], stride * 2, box)

    x, _, x_bytes = (operand, k, 2 * k) if b.before else from_row(b.input)
    box_rows = min(rows, s.tile_rows)
    results = [from_row(last.output) for last in b.lasts]
    y, _, y_bytes = results[0]
    sums = (
        tensor_map(b.output_dtype, y, out, rows, y_bytes, min(PANEL, s.tile_rows), source.add_width)
        if s.tail is Tail.REDUCE_ADD
        else bytes(MAP_BYTES)
    )
    lasts = [
        tensor_map(b.dtype, where[x.weight][0], hid, x.columns, where[x.weight][1] * 2, width)
        for x, width in zip(b.lasts, s.widths, strict=True)
    ]
    maps = [
        tensor_map(b.dtype, x, k, rows, x_bytes, box_rows),
        *(weight(f.weight, k, s.middle_columns) for f in b.firsts),
        *lasts,
    ]
    if not b.one_layer:
        middle_rows = s.row_tiles * s.groups * s.tile_rows
        maps.append(tensor_map(b.dtype, middle, s.group_columns, middle_rows, s.group_columns * 2, box_rows))
    views = [*(v.view for v in source.vectors), *source.row_vectors]
    vectors = [where[v.of][0] for v in views] or [0]
    residuals = [from_row(op.params[0]) for op in b.loads] or [(0, 0, 0)]
    words = [*vectors, *(r[0] for r in residuals), *(r[1] for r in residuals)]
    words += [operand] if b.one_layer else [middle, operand]
    words += [*(r[0] for r in results), partial, *(r[1] for r in results), space, dump, timeout_ns]
    packed = b"".join([*maps, sums]) + struct.pack(f"<{len(words)}Qii", *words, rows, box_rows)
    return packed + bytes(-len(packed) % 64)
