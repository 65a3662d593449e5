"""The argument of a row stream's kernel."""

from __future__ import annotations

from collections.abc import Mapping

from tilestream.errors import InputError
from tilestream.ir.pipeline import DTYPE_BYTES, TILE_ROWS, Pipeline
from tilestream.kernels.parts.params import MAP_BYTES, Where, at_least_one
from tilestream.kernels.parts.source import Call, KernelSource
from tilestream.kernels.parts.tensor_maps import MatrixMap, PixelMap
from tilestream.kernels.stream.node_sums import STARTS
from tilestream.kernels.stream.tables import INDEX, TABLE, MapSpec, Tables

MOST_ROWS = 2**31 - 1 - 2 * TILE_ROWS
"""Row numbers are 32-bit, and rounded up to a step of tiles."""


def pack(source: KernelSource, call: Call) -> bytes:
    """The bytes of ``Params``.

    Raises:
        InputError: pictures or a table have more rows than a kernel can count.
    """
    tables: Tables = source.tables
    pipeline, rows, at = source.pipeline, call.part.rows, call.at
    for w in tables.windows:
        pixels = rows // w.lowest.pixels * w.size[0] * w.size[1]
        if pixels > MOST_ROWS:
            raise InputError(f"pictures {w.tensor!r} have {pixels} pixels, more than {MOST_ROWS}", "give fewer images")
    told = at_least_one([_pointer(*p, call.where, pipeline) for p in tables.pointers], (0, 0))
    encoded = [_map(spec, tables, call, pipeline) for spec in tables.maps]
    phase = {"phase": call.part.phase} if any(p.kind == STARTS for p in tables.pointers) else {}
    stamps = dict(zip(("stamps", "stamp_capacity"), call.stamps, strict=True)) if source.stamped else {}
    return source.params.pack(
        maps=at_least_one(encoded, bytes(MAP_BYTES)),
        pointers=[address for address, _ in told],
        strides=[stride for _, stride in told],
        flags=at["lines"],
        epoch=at["epoch"],
        exits=at["exits"],
        dump=call.dump,
        limit_ns=call.timeout_ns,
        rows=rows,
        **phase,
        **stamps,
    )


def _map(spec: MapSpec, tables: Tables, call: Call, pipeline: Pipeline) -> bytes:
    """A tensor map: of a tensor of the call, of a queue's ring or packed weights in the workspace, of pictures."""
    if spec.kind == "window":
        return _pixels(spec, tables, call)
    if spec.row_bytes:
        address, row_bytes = call.at[spec.name], spec.row_bytes
    else:
        address, stride, _ = call.where[spec.name]
        row_bytes = stride * DTYPE_BYTES[pipeline.tensor(spec.name).dtype]
    rows = spec.rows or call.part.rows
    return call.encode(MatrixMap(spec.dtype, address, spec.columns, rows, row_bytes, spec.box_rows))


def _pixels(spec: MapSpec, tables: Tables, call: Call) -> bytes:
    """The tensor map of pictures whose taps are copied in bulk."""
    w = tables.windows[int(spec.name)]
    sizes = (w.size[2], w.size[1], w.size[0], call.part.rows // w.lowest.pixels)
    strides, address = (w.lowest.stride_x, w.lowest.stride_y), call.where[w.tensor].address
    return call.encode(PixelMap(w.dtype, address, sizes, *w.corners, strides, spec.box_rows))


def _pointer(kind: str, name: str, first: int, where: Mapping[str, Where], pipeline: Pipeline) -> tuple[int, int]:
    """Address and stride of a tensor that is read element by element, from its element ``first``: elements from row
    to row; of a table bytes; of an index the rows of the table that it goes into."""
    address, stride, _ = where[name]
    if first:
        address += first * DTYPE_BYTES[pipeline.tensor(name).dtype]
    if kind == STARTS:
        return address, where[name].rows - 1
    if kind == TABLE:
        return address, stride * DTYPE_BYTES[pipeline.tensor(name).dtype]
    if kind.startswith(INDEX):
        table = kind.removeprefix(INDEX)
        stride = where[table].rows
        if stride > MOST_ROWS:
            what = f"table {table!r} has {stride} rows, more than {MOST_ROWS}"
            raise InputError(what, "gather its rows before the pipeline")
    return address, stride
