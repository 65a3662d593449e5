"""A shared tile's CUDA source: the shape as constants, two epilogues as functions, one kernel."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import jinja2

from tilestream.ir.axes import View
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, TileOp
from tilestream.ir.plain import plain
from tilestream.kernels.parts.element import element_function
from tilestream.kernels.parts.mma import specialisation
from tilestream.kernels.parts.params import MAP, Field, Struct, pointers
from tilestream.kernels.parts.source import KernelSource, kernel_name
from tilestream.kernels.parts.templating import template
from tilestream.kernels.product.shared_tile import SharedTile, Tail, build
from tilestream.kernels.product.shared_tile.before import row_code, row_vectors
from tilestream.kernels.stream.places import REGISTER_SPLITS

MIDDLE = "middle"
TAILS = {Tail.NONE: "NO_TAIL", Tail.PARTIALS: "PARTIALS", Tail.REDUCE_ADD: "REDUCE_ADD", Tail.CLUSTER: "CLUSTER"}


@dataclass(frozen=True)
class Vector:
    """A vector or scalar that an epilogue reads: ``columns`` fp32 words at byte ``at`` of the kernel's vectors.

    ``first``: the CTA's first column in C++ (``0`` of a scalar); ``part``: of which epilogue, ``middle`` or a result.
    """

    view: View
    dtype: str
    columns: int
    size: int
    first: str
    part: str
    at: int

    @property
    def offset(self) -> int:
        return sum(at.offset for at in self.view.at or ())


class Operands(NamedTuple):
    """What the packer reads: the schedule, and vectors in the order of ``Params::vectors``."""

    schedule: SharedTile
    vectors: tuple[Vector, ...]
    row_vectors: tuple[View, ...]


def argument(s: SharedTile, vectors: int) -> Struct:
    """``Params`` of a kernel that reads so many vectors."""
    b = s.block
    loads, lasts = max(len(b.loads), 1), len(b.lasts)
    common = (
        Field("const void*", "vectors", max(vectors, 1)),
        Field("const void*", "rows_of", loads),
        Field("long long", "strides_of", loads),
    )
    last = (
        *pointers("flags", type="u64*"),
        *pointers("dump", type="ExchangeDump*"),
        Field("u64", "limit_ns"),
        Field("int", "rows"),
        Field("int", "box_rows", note="of a copy of left operands: no more than there are"),
        *([Field("int", "first_row", note="of the launch, which has a part of all rows")] if b.grid else []),
    )
    if b.one_layer:
        maps = (Field(MAP, "input"), Field(MAP, "weights", lasts), Field(MAP, "sums"))
        results = (Field("void*", "results", lasts), *pointers("partial", type="float*"))
        strides = Field("long long", "result_strides", lasts)
        return Struct("Params", (*maps, *common, *pointers("operand_data"), *results, strides, *last))
    maps = tuple(
        Field(MAP, name, len(b.firsts) if name == "firsts" else None)
        for name in ("input", "firsts", "second", "middle", "sums")
    )
    results = (*pointers("middle_data", "operand_data", "result"), *pointers("partial", type="float*"))
    return Struct("Params", (*maps, *common, *results, Field("long long", "result_stride"), *last))


def emit(pipeline: Pipeline) -> KernelSource:
    """Generate the kernel of a pipeline whose one stage is a shared tile.

    Raises:
        VerifyError: from the schedule, naming the user's line.
        CompileError: a tile op has no CUDA snippet.
    """
    written = plain(pipeline)
    s = build(written.stages[0], written)
    vectors = _vectors(s, written)
    share = 2 if s.halves else 1
    params = argument(s, len(vectors) + len(row_vectors(s)))
    weights = s.left_stages * s.left_bytes + s.gather_bytes
    scatter = weights + s.weight_stages * s.weight_bytes
    blocks = sorted({s.middle_columns // share // 8, s.out_columns // share // 8} - {0})
    text = _template().render(
        name=kernel_name(pipeline),
        pipeline=pipeline,
        s=s,
        tail=TAILS[s.tail],
        vectors=vectors,
        row_vectors=row_vectors(s),
        params=params,
        before=row_code(s, written, len(vectors)) if s.block.before else "",
        add_width=add_width(s),
        weights=weights,
        scatter=scatter,
        bars=scatter + s.scatter_bytes + s.vector_bytes,
        mma=[specialisation(s.block.dtype, n) for n in blocks],
        even=all(last.columns % 2 == 0 for last in s.block.lasts),
        middle="" if s.block.one_layer else _middle(s, vectors),
        beside=[_row_load(s, written, op) for op in s.block.after if op.kind == "load"],
        after=_after(s, vectors),
        tap=s.block.grid.taps[0] if s.block.grid is not None else None,
    )
    text = re.sub(r"\n{3,}", "\n\n", text)
    splits = tuple(r for r in REGISTER_SPLITS if r[0] >= s.registers) or REGISTER_SPLITS[-1:]
    return KernelSource(pipeline, text, s.shared_bytes, params, splits, Operands(s, vectors, row_vectors(s)))


def add_width(s: SharedTile) -> int:
    """Columns of the boxes that results are added to memory in: a divisor of a warpgroup's, 64 at most."""
    columns = s.out_columns // (2 if s.halves else 1)
    return max(w for w in range(8, 65, 8) if columns % w == 0)


def _vectors(s: SharedTile, pipeline: Pipeline) -> tuple[Vector, ...]:
    made: list[Vector] = []
    at = 0
    parts = [] if s.block.one_layer else [(s.block.middle, "hid", s.middle_columns, s.block.sizes[1], MIDDLE)]
    for last, width in zip(s.block.lasts, s.widths, strict=True):
        first = f"member * {width}" if s.block.one_layer else "out"
        parts.append((last.after, first, width, last.columns, last.total))
    for ops, first, columns, size, part in parts:
        for view in s.block.vectors(ops):
            dtype = pipeline.tensor(view.of).dtype
            scalar = not any(c.axes for c in view.at or ())
            shape = (1, 1, "0") if scalar else (columns, size, first)
            made.append(Vector(view, dtype, *shape, part, at))
            at += 4 * columns
    return tuple(made)


def _middle(s: SharedTile, vectors: Sequence[Vector]) -> str:
    """From the first products' sums to the middle."""
    sums = {f.tile: f"x[{i}]" for i, f in enumerate(s.block.firsts)}
    return element_function(s.block.middle, sums, s.block.hidden, _in_shared(vectors, MIDDLE))


def _after(s: SharedTile, vectors: Sequence[Vector]) -> str:
    """From the last layer's sums to the results: which one it is, a CTA's column tells."""
    bodies = [element_function(x.after, {x.total: "y"}, x.result, _in_shared(vectors, x.total)) for x in s.block.lasts]
    text = bodies[-1]
    for body, width in zip(bodies[-2::-1], s.widths[-2::-1], strict=True):
        text = f"    if (c < {width}) {{\n{body}\n    }}\n    c -= {width};\n{text}"
    return text


def _in_shared(vectors: Sequence[Vector], part: str) -> Callable[[View], str]:
    """An element of a vector of ``part`` at column ``c``."""
    where = {v.view: v for v in vectors if v.part == part}
    return lambda view: f"ldsf(vectors + {where[view].at}{' + 4 * c' if where[view].first != '0' else ''})"


def _row_load(s: SharedTile, pipeline: Pipeline, op: TileOp) -> str:
    """One element, at ``(row, column)``, of the tensor with rows that ``op`` loads."""
    k, dtype = s.block.loads.index(op), pipeline.tensor(op.params[0]).dtype
    start = f"(const char*)p.rows_of[{k}] + {DTYPE_BYTES[dtype]} * (u64)row * p.strides_of[{k}]"
    return f"Io<{dtype}>::param({start}, column)"


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    return template("shared_tile.cu.j2")
