"""The argument of a row stream's kernel."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tilestream.errors import InputError
from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS, Pipeline
from tilestream.kernels.parts.params import MAP_BYTES, TIMEOUT_NS, Where, at_least_one
from tilestream.kernels.parts.tensor_maps import Maps
from tilestream.kernels.stream.emit import KernelSource
from tilestream.kernels.stream.tables import INDEX, TABLE, MapSpec, Tables

MOST_ROWS = 2**31 - 1 - 2 * TILE_ROWS
"""Row numbers are 32-bit, and rounded up to a step of tiles."""


@dataclass(frozen=True)
class Addresses:
    """Device memory of a launch besides its tensors; ``stamps`` and room for how many, of a kernel that has them."""

    lines: int
    epoch: int
    exits: int
    rings: list[int]
    packed: list[int]
    dump: int
    stamps: int = 0
    room: int = 0


def pack(
    source: KernelSource,
    where: Mapping[str, Where],
    at: Addresses,
    rows: int,
    maps: Maps,
    timeout_ns: int = TIMEOUT_NS,
) -> bytes:
    """The bytes of ``Params`` for ``rows`` rows of the tensors at ``where``.

    Raises:
        InputError: pictures or a table have more rows than a kernel can count.
    """
    tables, pipeline = source.tables, source.pipeline
    for w in tables.windows:
        pixels = rows // (w.height * w.width) * w.in_height * w.in_width
        if pixels > MOST_ROWS:
            raise InputError(f"pictures {w.tensor!r} have {pixels} pixels, more than {MOST_ROWS}", "give fewer images")
    told = at_least_one([_pointer(*p, where, pipeline) for p in tables.pointers], (0, 0))
    encoded = [_map(spec, tables, where, at, rows, maps, pipeline) for spec in tables.maps]
    stamps = {"stamps": at.stamps, "stamp_capacity": at.room} if source.stamped else {}
    return source.params.pack(
        maps=at_least_one(encoded, bytes(MAP_BYTES)),
        pointers=[address for address, _ in told],
        strides=[stride for _, stride in told],
        flags=at.lines,
        epoch=at.epoch,
        exits=at.exits,
        dump=at.dump,
        limit_ns=timeout_ns,
        rows=rows,
        **stamps,
    )


def _map(
    spec: MapSpec,
    tables: Tables,
    where: Mapping[str, Where],
    at: Addresses,
    rows: int,
    maps: Maps,
    pipeline: Pipeline,
) -> bytes:
    """A tensor map: of a tensor of the call, of a queue's ring or packed weights in the workspace, of pictures."""
    if spec.kind == "window":
        return _pixels(spec, tables, where, rows, maps)
    if spec.kind == "ring":
        queue = tables.queues[int(spec.name)]
        address, row_bytes = at.rings[int(spec.name)], queue.features * DTYPE_BYTES[queue.dtype]
    elif spec.kind == "packed":
        packed = tables.packs[int(spec.name)]
        address, row_bytes = at.packed[int(spec.name)], packed.columns * DTYPE_BYTES[packed.dtype]
    else:
        address, stride, _ = where[spec.name]
        row_bytes = stride * DTYPE_BYTES[pipeline.tensor(spec.name).dtype]
    return maps.matrix(spec.dtype, address, spec.columns, spec.rows or rows, row_bytes, spec.box_rows)


def _pixels(spec: MapSpec, tables: Tables, where: Mapping[str, Where], rows: int, maps: Maps) -> bytes:
    """The tensor map of pictures whose taps are copied in bulk."""
    w = tables.windows[int(spec.name)]
    sizes = (w.channels, w.in_width, w.in_height, rows // (w.height * w.width))
    strides = (w.stride_x, w.stride_y)
    return maps.pixels(w.dtype, where[w.tensor].address, sizes, *w.corners, strides, spec.box_rows)


def _pointer(kind: str, name: str, first: int, where: Mapping[str, Where], pipeline: Pipeline) -> tuple[int, int]:
    """Address and stride of a tensor that is read element by element, from its element ``first``: elements from row
    to row; of a table bytes; of an index the rows of the table that it goes into."""
    address, stride, _ = where[name]
    if first:
        address += first * DTYPE_BYTES[pipeline.tensor(name).dtype]
    if kind == TABLE:
        return address, stride * DTYPE_BYTES[pipeline.tensor(name).dtype]
    if kind.startswith(INDEX):
        table = kind.removeprefix(INDEX)
        stride = where[table].rows
        if stride > MOST_ROWS:
            what = f"table {table!r} has {stride} rows, more than {MOST_ROWS}"
            raise InputError(what, "gather its rows before the pipeline")
    return address, stride
