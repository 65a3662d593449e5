"""The argument of a shared tile's kernel, as its template declares it."""

from __future__ import annotations

from tilestream.ir.pipeline import DTYPE_BYTES
from tilestream.kernels.parts.params import LINE_BYTES, MAP_BYTES, at_least_one
from tilestream.kernels.parts.source import Call, KernelSource, Space
from tilestream.kernels.parts.taps import Grid
from tilestream.kernels.parts.tensor_maps import MakePixelMap
from tilestream.kernels.product.shared_tile import Block, SharedTile, Tail
from tilestream.kernels.product.shared_tile.block import PANEL
from tilestream.kernels.product.shared_tile.emit import add_width
from tilestream.kernels.product.sharing import Middle

PHASES = 4
"""Flags a CTA: result cleared, middle there, partial result there, rows of the operand there (``enum Phase`` of
collectives.cuh)."""


def space(s: SharedTile) -> Space:
    """Device memory of a shared tile besides its tensors.

    The flags are zero at first, and partial results that say which launch they are of. The middle, where it goes
    through the L2, is ``[row tiles x groups x tile rows, columns of a group]`` in the products' dtype; partial results
    are ``[row tiles, columns, groups, rows x columns of a CTA]`` in fp32, of as many rows as warps have. Where
    something stands in front of the first layer, what it makes is the operand, ``[row tiles x tile rows, k]``.
    """
    through_l2 = s.middle is Middle.L2 and not s.block.one_layer
    sizes = {
        "flags": PHASES * s.ctas * LINE_BYTES,
        "middle": s.row_tiles * s.groups * s.tile_rows * s.group_columns * 2 if through_l2 else 0,
        "partial": s.ctas * s.partial_bytes if s.tail is Tail.PARTIALS else 0,
        "operand": s.row_tiles * s.tile_rows * s.block.sizes[0] * 2 if s.block.before else 0,
    }
    return Space(tuple(sizes.items()), frozenset(("flags", "partial") if s.tagged else ("flags",)))


def pack(source: KernelSource, call: Call) -> bytes:
    """The bytes of ``Params``."""
    (s, vectors, row_vectors), part, where, at = source.tables, call.part, call.where, call.at
    b = s.block
    types = {t.name: t.dtype for t in source.pipeline.tensors}
    middle, operand = at["middle"], at["operand"]
    k, hid, out = b.sizes
    tensor_map, first, rows = call.maps.matrix, part.first, part.rows

    def from_row(name: str) -> tuple[int, int, int]:
        """Address, elements and bytes from row to row."""
        address, stride, _ = where[name]
        return address + first * stride * DTYPE_BYTES[types[name]], stride, stride * DTYPE_BYTES[types[name]]

    def weight(name: str, columns: int, box: int) -> bytes:
        address, stride, _ = where[name]
        return tensor_map(b.dtype, address, columns, source.pipeline.tensor(name).shape[0], stride * 2, box)

    box_rows = min(rows, s.tile_rows)
    results = [from_row(last.output) for last in b.lasts]
    y, _, y_bytes = results[0]
    sums = (
        tensor_map(b.output_dtype, y, out, rows, y_bytes, min(PANEL, s.tile_rows), add_width(s))
        if s.tail is Tail.REDUCE_ADD
        else bytes(MAP_BYTES)
    )
    lasts = [
        tensor_map(b.dtype, where[x.weight][0], hid, x.columns, where[x.weight][1] * 2, width)
        for x, width in zip(b.lasts, s.widths, strict=True)
    ]
    if b.grid is not None:
        left = _pictures(b, b.grid, where[b.input].address, part.total, s.tile_rows, call.maps.pixels)
    else:
        x, _, x_bytes = (operand, k, 2 * k) if b.before else from_row(b.input)
        left = tensor_map(b.dtype, x, k, rows, x_bytes, box_rows)
    views = [*(v.view for v in vectors), *row_vectors]
    residuals = at_least_one([from_row(op.params[0]) for op in b.loads], (0, 0, 0))
    made = {
        "input": left,
        "sums": sums,
        "vectors": at_least_one([where[v.of][0] for v in views]),
        "rows_of": [r[0] for r in residuals],
        "strides_of": [r[1] for r in residuals],
        "operand_data": operand,
        "partial": at["partial"],
        "flags": at["flags"],
        "dump": call.dump,
        "limit_ns": call.timeout_ns,
        "rows": rows,
        "box_rows": box_rows,
    }
    if b.one_layer:
        made |= {"weights": lasts, "results": [r[0] for r in results], "result_strides": [r[1] for r in results]}
    else:
        middle_rows = s.row_tiles * s.groups * s.tile_rows
        made |= {
            "firsts": [weight(f.weight, k, s.middle_columns) for f in b.firsts],
            "second": lasts[0],
            "middle": tensor_map(b.dtype, middle, s.group_columns, middle_rows, s.group_columns * 2, box_rows),
            "middle_data": middle,
            "result": results[0][0],
            "result_stride": results[0][1],
        }
    if b.grid is not None:
        made["first_row"] = first
    return source.params.pack(**made)


def _pictures(b: Block, grid: Grid, address: int, rows: int, box: int, pixel_map: MakePixelMap) -> bytes:
    """The map of the pictures that make ``rows`` rows, ``box`` of which are a copy."""
    tap = grid.taps[0]
    sizes = (b.sizes[0] // len(grid.taps), grid.size[1], grid.size[0], rows // tap.pixels)
    return pixel_map(b.dtype, address, sizes, *grid.corners, (tap.stride_x, tap.stride_y), box)
