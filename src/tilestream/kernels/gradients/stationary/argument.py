"""The argument of a kernel of stationary sums, and of a backward chain's."""

from __future__ import annotations

from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS, Role
from tilestream.kernels.parts.params import MAP_BYTES
from tilestream.kernels.parts.source import Call, KernelSource


def pack(source: KernelSource, call: Call) -> bytes:
    """The bytes of ``Params``."""
    (tensors, pointers), where, rows = source.tables, call.where, call.part.rows
    maps = []
    for name in tensors:
        (address, stride, _), tensor = where[name], source.pipeline.tensor(name)
        size = DTYPE_BYTES[tensor.dtype]
        height = tensor.shape[0] if tensor.role is Role.PARAMETER else rows
        # The kernel reads nothing where there are no rows, and there is no tensor map of none.
        sizes = (tensor.features, height, stride * size, TILE_ROWS)
        maps.append(call.maps.matrix(tensor.dtype, address, *sizes) if rows else bytes(MAP_BYTES))
    written = [where[name] for name in pointers]
    return source.params.pack(
        maps=maps or [bytes(MAP_BYTES)],
        pointers=[w.address for w in written],
        strides=[w.stride for w in written],
        flags=call.at["flags"],
        dump=call.dump,
        limit_ns=call.timeout_ns,
        partials=call.at["partials"],
        rows=rows,
    )
