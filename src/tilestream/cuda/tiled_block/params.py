"""The argument of a tiled block's kernel, as its template declares it."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import astuple

from tilestream.cuda.pack import Where
from tilestream.cuda.shared_tile.params import TIMEOUT_NS, MakeMap
from tilestream.cuda.tiled_block.emit import TiledBlockSource
from tilestream.ir.pipeline import DTYPE_BYTES
from tilestream.schedule.tiled_block import COLUMNS, ROWS, space_bytes

GROUP_ROWS = ROWS // 2
"""Of a warpgroup, whose tiles are stored 64 columns at a time."""


def params(
    source: TiledBlockSource, where: Mapping[str, Where], space: int, dump: int, make_map: MakeMap, rows: int,
    timeout_ns: int = TIMEOUT_NS,
) -> bytes:  # fmt: skip
    """The bytes of ``Params`` for ``rows`` rows of the tensors at ``where``.

    Args:
        space: address of ``sum(space_bytes(source.schedule))`` bytes, the flags zero at first.
        dump: address of the record that an expired wait leaves.
        make_map: ``driver.tensor_map``, or what the host build reads as one.
    """
    s, b = source.schedule, source.schedule.block
    types = {t.name: t.dtype for t in source.pipeline.tensors}
    flags, hidden_size, _ = space_bytes(s)
    hidden, operand = space + flags, space + flags + hidden_size
    k, hid, _ = b.sizes
    ring_rows = s.slots * ROWS

    def row_bytes(name: str) -> int:
        return where[name].stride * DTYPE_BYTES[types[name]]

    def weight(name: str, columns: int) -> bytes:
        held = source.pipeline.tensor(name).shape[0]
        return make_map(b.dtype, where[name].address, columns, held, row_bytes(name), COLUMNS // 2)

    if b.before:
        left = make_map(b.dtype, operand, k, ring_rows, 2 * k, ROWS)
    else:
        left = make_map(b.dtype, where[b.input].address, k, rows, row_bytes(b.input), ROWS)
    between = [
        *(weight(f.weight, k) for f in b.firsts),
        make_map(b.dtype, hidden, hid, ring_rows, 2 * hid, ROWS),
        make_map(b.dtype, hidden, hid, ring_rows, 2 * hid, GROUP_ROWS),
    ]
    maps = [
        left,
        *([] if b.one_layer else between),
        *(weight(last.weight, hid) for last in b.lasts),
        *(
            make_map(b.output_dtype, where[x.output].address, x.columns, rows, row_bytes(x.output), GROUP_ROWS)
            for x in b.lasts
        ),
    ]
    vectors = [where[v.of].address for v in source.vectors] or [0]
    loads = [where[op.params[0]] for op in b.loads]
    words = [*vectors, *([w.address for w in loads] or [0]), *([w.stride for w in loads] or [0])]
    words += [operand, space, dump, timeout_ns]
    numbers = [*astuple(s.walk(rows)), rows, s.ctas]
    packed = b"".join(maps) + struct.pack(f"<{len(words)}Q{len(numbers)}i", *words, *numbers)
    return packed + bytes(-len(packed) % 64)
