"""The argument of a kernel of stationary sums, and of a backward chain's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS, Role
from tilestream.kernels.gradients.stationary.emit import StationarySource
from tilestream.kernels.parts.params import MAP_BYTES, TIMEOUT_NS, Where
from tilestream.kernels.parts.tensor_maps import MakeMap


class Addresses(NamedTuple):
    """Device memory of a launch besides its tensors."""

    flags: int
    partials: int
    dump: int


def pack(
    source: StationarySource,
    where: Mapping[str, Where],
    at: Addresses,
    rows: int,
    make_map: MakeMap,
    timeout_ns: int = TIMEOUT_NS,
) -> bytes:
    """The bytes of ``Params`` for ``rows`` rows of the tensors at ``where``."""
    maps = []
    for name in source.maps:
        (address, stride, _), tensor = where[name], source.pipeline.tensor(name)
        size = DTYPE_BYTES[tensor.dtype]
        height = tensor.shape[0] if tensor.role is Role.PARAMETER else rows
        # The kernel reads nothing where there are no rows, and there is no tensor map of none.
        encoded = make_map(tensor.dtype, address, tensor.features, height, stride * size, TILE_ROWS) if rows else None
        maps.append(encoded or bytes(MAP_BYTES))
    written = [where[name] for name in source.pointers]
    return source.params.pack(
        maps=maps or [bytes(MAP_BYTES)],
        pointers=[w.address for w in written],
        strides=[w.stride for w in written],
        flags=at.flags,
        dump=at.dump,
        limit_ns=timeout_ns,
        partials=at.partials,
        rows=rows,
    )
