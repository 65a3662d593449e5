"""A tiled block's CUDA source: the shape as constants, epilogues as functions, one kernel."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

import jinja2

from tilestream.ir.axes import View
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, TileOp
from tilestream.ir.plain import plain
from tilestream.kernels.parts.element import pair_function
from tilestream.kernels.parts.mma import specialisation
from tilestream.kernels.parts.params import MAP, Field, Struct, pointers
from tilestream.kernels.parts.source import KernelSource, kernel_name
from tilestream.kernels.parts.templating import template
from tilestream.kernels.product.tiled_block.before import prefetch_code, row_code, row_vectors
from tilestream.kernels.product.tiled_block.model import COLUMNS, STEPS, THREADS, TiledBlock, Walk, build

REGISTER_SPLITS = ((208, 88), (200, 104))
"""Of a consumer and of a loader thread: sums take half of the former, rows of a norm want the latter."""


WALK = Struct("Walk", tuple(Field("int", field.name) for field in fields(Walk)), declared=False)


class Operands(NamedTuple):
    """What the packer reads: the schedule, and vectors in the order of ``Params::vectors``."""

    schedule: TiledBlock
    vectors: tuple[View, ...]


def argument(s: TiledBlock, vectors: int) -> Struct:
    """``Params`` of a kernel that reads so many vectors."""
    b = s.block
    loads, lasts = max(len(b.loads), 1), len(b.lasts)
    middle = (Field(MAP, "firsts", len(b.firsts)), Field(MAP, "hidden_in"), Field(MAP, "hidden_out"))
    each = (
        Field(MAP, "input"),
        *(middle if b.firsts else ()),
        Field(MAP, "seconds", lasts),
        Field(MAP, "results", lasts),
        Field("const void*", "vectors", max(vectors, 1)),
        Field("const void*", "rows_of", loads),
        Field("long long", "strides_of", loads),
        *pointers("operand_data"),
        *pointers("flags", type="u64*"),
        *pointers("dump", type="ExchangeDump*"),
        Field("u64", "limit_ns"),
        Field(WALK, "walk"),
        Field("int", "rows"),
        Field("int", "ctas"),
    )
    return Struct("Params", each)


def emit(pipeline: Pipeline) -> KernelSource:
    """Generate the kernel of a pipeline whose one stage is a tiled block.

    Raises:
        VerifyError: from the schedule, naming the user's line.
        CompileError: a tile op has no CUDA snippet.
    """
    written = plain(pipeline)
    s = build(written.stages[0], written)
    b = s.block
    middle, afters = b.vectors(b.middle), [b.vectors(last.after) for last in b.lasts]
    after = afters[0]
    hidden = _columns(written, middle, 0, b.sizes[1], s.hidden_columns)
    widths = [last.columns for last in b.lasts]
    result = _columns(written, after, len(middle), widths[0], COLUMNS, several=len(widths) > 1)
    vectors = (*middle, *(v for each in afters for v in each), *row_vectors(b))
    beside = _beside(written, [op for op in b.lasts[0].after if op.kind == "load"], widths[0])
    sums = {f.tile: f"x[e][{i}]" for i, f in enumerate(b.firsts)}
    params = argument(s, len(vectors))
    text = _template().render(
        name=kernel_name(pipeline),
        pipeline=pipeline,
        s=s,
        ends=list(accumulate(s.result_blocks)),
        steps=STEPS,
        threads=THREADS,
        params=params,
        mma=specialisation(b.dtype, COLUMNS // 8, starts=True),
        hidden=hidden,
        result=result,
        beside=beside,
        middle=pair_function(b.middle, sums, b.hidden, _in_registers(middle)) if sums else "",
        after=pair_function(b.lasts[0].after, {b.lasts[0].total: "y[e]"}, b.lasts[0].result, _in_registers(after)),
        before=row_code(b, written, len(middle) + len(after)) if b.before else "",
        prefetch=prefetch_code(b, written),
    )
    text = re.sub(r"\n{3,}", "\n\n", text)
    return KernelSource(pipeline, text, s.shared_bytes, params, REGISTER_SPLITS, Operands(s, vectors))


@dataclass(frozen=True)
class Columns:
    """What an epilogue reads beside its sums, of columns ``c`` and ``c + 1``: C++ statements.

    Attributes:
        loads: as they lie in memory, to words ``w`` of 32 bits.
        values: those words as ``v[k][0]`` and ``v[k][1]`` of vector ``k``.
        words: how many there are.
    """

    loads: tuple[str, ...]
    values: tuple[str, ...]
    words: int


def _columns(
    pipeline: Pipeline, vectors: Sequence[View], first: int, size: int, block: int, several: bool = False
) -> Columns:
    """Of ``vectors`` of ``size`` elements or scalars, pointer ``first`` of ``Params::vectors`` and those behind it.

    Args:
        block: columns of a tile.
        several: they are those of the first of several results, ``last`` in C++; those of the others lie behind them.
    """
    loads: list[str] = []
    values: list[str] = []
    words = 0
    for k, view in enumerate(vectors):
        dtype = pipeline.tensor(view.of).dtype
        offset = sum(at.offset for at in view.at or ())
        index = f"{first + k} + last * LAST_VECTORS" if several else f"{first + k}"
        start = f"(const char*)p.vectors[{index}] + {DTYPE_BYTES[dtype] * offset}"
        if not any(at.axes for at in view.at or ()):
            loads.append(f"w[{words}] = bits_of(Io<{dtype}>::param({start}, 0));")
            values.append(f"v[{k}][0] = v[{k}][1] = float_of(w[{words}]);")
            words += 1
            continue
        aligned = str(offset % 2 == 0).lower()
        inside = "c < columns_of(last) ? c : 0" if several else _inside(size, block)
        loads.append(f"Pair<{dtype}>::load<{aligned}>({start}, {inside}, w + {words});")
        values.append(f"Pair<{dtype}>::values(w + {words}, v[{k}][0], v[{k}][1]);")
        words += DTYPE_BYTES[dtype] // 2
    return Columns(tuple(loads), tuple(values), words)


def _inside(size: int, block: int) -> str:
    """Column ``c``, or the first where tiles go beyond the last one: nobody stores what becomes of those."""
    return "c" if size % block == 0 else f"c < {size} ? c : 0"


def _beside(pipeline: Pipeline, ops: Sequence[TileOp], size: int) -> Columns:
    """Of row ``row`` of what ``ops`` load: to words ``w``, and from these to ``r[0][k]`` and ``r[1][k]``."""
    loads: list[str] = []
    values: list[str] = []
    words = 0
    for k, op in enumerate(ops):
        dtype = pipeline.tensor(op.params[0]).dtype
        start = f"(const char*)p.rows_of[{k}] + {DTYPE_BYTES[dtype]} * (u64)row * p.strides_of[{k}]"
        loads.append(f"Pair<{dtype}>::load<true>({start}, {_inside(size, COLUMNS)}, w + {words});")
        values.append(f"Pair<{dtype}>::values(w + {words}, r[0][{k}], r[1][{k}]);")
        words += DTYPE_BYTES[dtype] // 2
    return Columns(tuple(loads), tuple(values), words)


def _in_registers(vectors: Sequence[View]) -> Callable[[View], str]:
    """An element of a vector, of ``Columns.values``."""
    return lambda view: f"v[{vectors.index(view)}][e]"


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    return template("tiled_block.cu.j2")
