"""What is a shared tile's own in its code: constants, vectors in shared memory, and fields of the argument."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

from tilestream.ir.axes import View
from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.parts.params import MAP, MAP_BYTES, Field, pointers
from tilestream.kernels.parts.source import Call
from tilestream.kernels.parts.tensor_maps import MatrixMap, PixelMap
from tilestream.kernels.product.before import Makers, is_scalar
from tilestream.kernels.product.block import PANEL
from tilestream.kernels.product.epilogue import Epilogue, epilogues
from tilestream.kernels.product.operands import Operands
from tilestream.kernels.product.shared_tile.model import SharedTile, Tail
from tilestream.kernels.product.sharing import Middle
from tilestream.kernels.stream.model import ceil_to
from tilestream.kernels.stream.places import splits_for

FLAGS = ("own_rows", "alone", "halves", "tagged")
SIZES = (
    "row_tiles", "groups", "columns", "warpgroups", "live_threads", "out_columns", "group_columns", "depth",
    "left_stages", "weight_stages", "weight_bytes",
)  # fmt: skip
PLACES = ("LEFT", "GATHER", "WEIGHTS", "SCATTER", "VECTORS", "BARS")
"""In shared memory, one behind the other."""


class SharedTileCode:
    """Vectors are copied to shared memory as fp32, each CTA's columns of them."""

    name = "shared_tile"
    head = "u32 vectors, int c"
    even_rows = False
    column = "c"
    starts = False

    def __init__(self, s: SharedTile, pipeline: Pipeline) -> None:
        self.s, self.b, self.pipeline = s, s.block, pipeline
        self.epilogues = epilogues(s.block)
        self.widths = ((s.middle_columns,) if s.block.firsts else ()) + s.widths
        share = 2 if s.halves else 1
        self.add_width = box_width(s.out_columns // share)
        self.blocks = sorted({s.middle_columns // share // 8, s.out_columns // share // 8} - {0})
        self.makers = Makers(32 if s.own_rows else 128 * s.warpgroups, late_vectors=s.own_rows)
        self.register_splits = splits_for(s.registers)

    def constants(self) -> Mapping[str, Mapping[str, object]]:
        s, b = self.s, self.b
        first_depth = ceil_to(b.sizes[0], 16) if s.short_first else s.depth
        rings = (s.left_stages * s.left_bytes, s.gather_bytes, s.weight_stages * s.weight_bytes)
        places = accumulate((*rings, s.scatter_bytes, s.vector_bytes), initial=0)
        held, own = s.gather_bytes > 0, s.middle is Middle.NONE
        flags = {name.upper(): getattr(s, name) for name in FLAGS}
        flags |= {"HELD": held, "OWN_MIDDLE": held and own, "BY_CLUSTER": held and not own}
        sizes = {name.upper(): getattr(s, name) for name in SIZES}
        sizes |= {
            "HID": b.sizes[1], "ROWS": s.tile_rows, "MIDDLE": s.middle_columns, "STEPS": s.first_steps,
            "FIRST_DEPTH": first_depth, "FIRST_PANELS": ceil_to(first_depth, PANEL), "ADD_WIDTH": self.add_width,
        }  # fmt: skip
        return {
            "Tail": {"TAIL": s.tail.name if s.tail is not Tail.NONE else "NO_TAIL"},
            "bool": flags | {"EVEN": all(last.columns % 2 == 0 for last in b.lasts)},
            "int": sizes | self._pictures(),
            "u32": dict(zip(PLACES, places, strict=True)),
        }

    def _pictures(self) -> dict[str, int]:
        """Rows that are output pixels of pictures, which taps move (pixel_panels.cuh)."""
        grid = self.b.grid
        if grid is None:
            return {"TAPS": 0}
        tap = grid.taps[0]
        return {
            "TAPS": len(grid.taps), "OUT_HEIGHT": tap.height, "OUT_WIDTH": tap.width, "STRIDE_Y": tap.stride_y,
            "STRIDE_X": tap.stride_x, "LOWEST_Y": tap.y, "LOWEST_X": tap.x,
            "CHANNELS": self.b.sizes[0] // len(grid.taps), "TAPS_ACROSS": grid.across, "TAP_Y": grid.step[0],
            "TAP_X": grid.step[1],
        }  # fmt: skip

    def lists(self) -> Mapping[str, Sequence[int]]:
        return {"width": self.s.product_widths, "start": self.s.starts}

    def reads(self) -> Sequence[tuple[str, Sequence[str]]]:
        """Every CTA has ``MIDDLE`` columns from ``hid`` on of the middle's, and ``member``'s of the results'."""
        lines: list[str] = []
        for e, width in zip(self.epilogues, self.widths, strict=True):
            first = "hid" if self.b.firsts and e is self.epilogues[0] else f"member * {width}"
            for k, view in enumerate(e.vectors):
                shape, start = (f"{width}, {e.columns}", first) if not is_scalar(view) else ("1, 1", "0")
                offset = sum(at.offset for at in view.at or ())
                copy = f"copy_vector<{self.pipeline.tensor(view.of).dtype}, {shape}, {128 * self.s.warpgroups}>"
                lines.append(f"{copy}(p.vectors[{e.first + k}], to + {self._at(e, k)}, {start}, {offset}, t);")
        return [("load_vectors(const Params& p, u32 to, int hid, int member, int t)", lines)]

    def _at(self, e: Epilogue, k: int) -> int:
        """The byte of shared memory, behind the first vector, where vector k of ``e`` begins."""
        before = zip(self.epilogues, self.widths, strict=True)
        return 4 * sum(width * min(max(0, e.first + k - x.first), len(x.vectors)) for x, width in before)

    def _body(self, e: Epilogue) -> str:
        return e.body([self._read(e, k, view) for k, view in enumerate(e.vectors)])

    def _read(self, e: Epilogue, k: int, view: View) -> str:
        at = f"vectors + {self._at(e, k)}"
        if is_scalar(view):
            return f"v[{k}][0] = v[{k}][1] = ldsf({at});"
        return f"Io<f32>::load({at} + 4 * c, v[{k}][0], v[{k}][1]);"

    def middle(self) -> str:
        return self._body(self.epilogues[0])

    def after(self) -> str:
        """Which result it is, a CTA's column tells."""
        *others, text = [self._body(e) for e in self.epilogues[-len(self.b.lasts) :]]
        for body, width in zip(reversed(others), self.s.widths[-2::-1], strict=True):
            text = f"    if (c < {width}) {{\n{body}\n    return;\n    }}\n    c -= {width};\n{text}"
        return text

    def maps(self) -> Sequence[Field]:
        return [Field(MAP, "middle"), Field(MAP, "sums")]

    def fields(self) -> Sequence[Field]:
        lasts = len(self.b.lasts)
        return (
            *pointers("middle_data"),
            *pointers("partial", type="float*"),
            Field("void*", "results", lasts),
            Field("long long", "result_strides", lasts),
            Field("int", "box_rows", note="of a copy of left operands: no more than there are"),
            Field("int", "first_row", note="of the launch, which has a part of all rows"),
        )

    def values(self, given: Operands) -> dict[str, Any]:
        s, b, call, part = self.s, self.b, given.call, given.call.part
        k, hid, out = b.sizes
        middle, partial, operand = (call.at[name] for name in ("middle", "partial", "operand"))
        box = min(part.rows, s.tile_rows)
        ring_rows = s.row_tiles * s.groups * s.tile_rows
        results = [given.rows(last.output) for last in b.lasts]
        if b.grid is not None:
            left = self._pixels(given.call)
        elif b.before:
            left = call.encode(MatrixMap(b.dtype, operand, k, part.rows, 2 * k, box))
        else:
            left = given.matrix(b.input, k, box)
        sums = middle_map = bytes(MAP_BYTES)
        if s.tail is Tail.REDUCE_ADD:
            y, _, pitch = results[0]
            height = min(PANEL, s.tile_rows)
            sums = call.encode(MatrixMap(b.output_dtype, y, out, part.rows, pitch, height, self.add_width))
        if dict(s.space.parts)["middle"]:
            columns = s.group_columns
            middle_map = call.encode(MatrixMap(b.dtype, middle, columns, ring_rows, columns * 2, box))
        return {
            "input": left,
            **given.weights(b, s.middle_columns, s.widths, s.depth),
            "middle": middle_map,
            "sums": sums,
            "middle_data": middle,
            "operand_data": operand,
            "partial": partial,
            "results": [r[0] for r in results],
            "result_strides": [r[1] for r in results],
            "box_rows": box,
            "first_row": part.first,
        }

    def _pixels(self, call: Call) -> bytes:
        """The map of the pictures that make the rows of the whole call."""
        b, grid = self.b, self.b.grid
        assert grid is not None
        tap = grid.taps[0]
        sizes = (b.sizes[0] // len(grid.taps), grid.size[1], grid.size[0], call.part.total // tap.pixels)
        strides, address = (tap.stride_x, tap.stride_y), call.where[b.input].address
        return call.encode(PixelMap(b.dtype, address, sizes, *grid.corners, strides, self.s.tile_rows))


def box_width(columns: int) -> int:
    """Columns of the boxes that ``columns`` are added to memory in: a divisor, 64 at most."""
    return max(w for w in range(8, 65, 8) if columns % w == 0)
