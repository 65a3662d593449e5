"""The argument of a tiled block's kernel, as its template declares it."""

from __future__ import annotations

from dataclasses import asdict

from tilestream.ir.pipeline import DTYPE_BYTES
from tilestream.kernels.parts.params import Where, at_least_one
from tilestream.kernels.parts.source import Call, KernelSource
from tilestream.kernels.product.tiled_block.model import COLUMNS, ROWS

GROUP_ROWS = ROWS // 2
"""Of a warpgroup, whose tiles are stored 64 columns at a time."""


def pack(source: KernelSource, call: Call) -> bytes:
    """The bytes of ``Params``."""
    (s, vectors), where, rows, make_map = source.tables, call.where, call.part.rows, call.maps.matrix
    b = s.block
    types = {t.name: t.dtype for t in source.pipeline.tensors}
    hidden, operand = call.at["hidden"], call.at["operand"]
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
    middle = {
        "firsts": [weight(f.weight, k) for f in b.firsts],
        "hidden_in": make_map(b.dtype, hidden, hid, ring_rows, 2 * hid, ROWS),
        "hidden_out": make_map(b.dtype, hidden, hid, ring_rows, 2 * hid, GROUP_ROWS),
    }
    loads = at_least_one([where[op.params[0]] for op in b.loads], Where(0, 0, 0))
    return source.params.pack(
        input=left,
        **({} if b.one_layer else middle),
        seconds=[weight(last.weight, hid) for last in b.lasts],
        results=[
            make_map(b.output_dtype, where[x.output].address, x.columns, rows, row_bytes(x.output), GROUP_ROWS)
            for x in b.lasts
        ],
        vectors=at_least_one([where[v.of].address for v in vectors]),
        rows_of=[w.address for w in loads],
        strides_of=[w.stride for w in loads],
        operand_data=operand,
        flags=call.at["flags"],
        dump=call.dump,
        limit_ns=call.timeout_ns,
        walk=asdict(s.walk(rows)),
        rows=rows,
        ctas=s.ctas,
    )
