"""A tiled block's CUDA source: the shape as constants, epilogues as functions, one kernel."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import jinja2

from tilestream.cuda.element import element_function
from tilestream.cuda.mma import specialisation
from tilestream.cuda.templating import template
from tilestream.cuda.tiled_block.before import prefetch_code, row_code, row_vectors
from tilestream.ir.axes import View
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, TileOp
from tilestream.ir.plain import plain
from tilestream.schedule.tiled_block import COLUMNS, STEPS, THREADS, TiledBlock, build

REGISTER_SPLITS = ((208, 88), (200, 104))
"""Of a consumer and of a loader thread: sums take half of the former, rows of a norm want the latter."""


@dataclass(frozen=True)
class TiledBlockSource:
    """Source text of one launch, and what its host side must prepare."""

    name: str
    text: str
    shared_bytes: int
    pipeline: Pipeline
    schedule: TiledBlock
    vectors: tuple[View, ...]
    register_splits: tuple[tuple[int, int], ...]
    stamped: bool = False
    threads: int = THREADS


def emit(pipeline: Pipeline) -> TiledBlockSource:
    """Generate the kernel of a pipeline whose one stage is a tiled block.

    Raises:
        VerifyError: from the schedule, naming the user's line.
        CompileError: a tile op has no CUDA snippet.
    """
    written = plain(pipeline)
    s = build(written.stages[0], written)
    b = s.block
    middle, after = b.vectors(b.middle), b.vectors(b.after)
    vectors = (*middle, *after, *row_vectors(b))
    beside = [op for op in b.after if op.kind == "load"]
    sums = {f.tile: f"x[{i}]" for i, f in enumerate(b.firsts)}
    text = _template().render(
        name="tilestream_" + re.sub(r"\W", "_", pipeline.name),
        pipeline=pipeline,
        s=s,
        steps=STEPS,
        threads=THREADS,
        vectors=vectors,
        mma=specialisation(b.dtype, COLUMNS // 8),
        hidden_vectors=[_vector(written, v, k, k, b.sizes[1], s.hidden_columns) for k, v in enumerate(middle)],
        result_vectors=[_vector(written, v, k, len(middle) + k, b.sizes[2], COLUMNS) for k, v in enumerate(after)],
        beside=[_pair_beside(written, op, k, b.sizes[2]) for k, op in enumerate(beside)],
        middle=element_function(b.middle, sums, b.hidden, _in_registers(middle)),
        after=element_function(b.after, {b.last.total: "y"}, b.last.result, _in_registers(after)),
        before=row_code(b, written, len(middle) + len(after)) if b.before else "",
        prefetch=prefetch_code(b, written),
    )
    text = re.sub(r"\n{3,}", "\n\n", text)
    name = "tilestream_" + re.sub(r"\W", "_", pipeline.name)
    return TiledBlockSource(name, text, s.shared_bytes, pipeline, s, vectors, REGISTER_SPLITS)


def _vector(pipeline: Pipeline, view: View, k: int, index: int, size: int, block: int) -> str:
    """Statement that loads columns ``c`` and ``c + 1`` of a vector of ``size``, or a scalar, into ``v[k]``.

    ``index``: of its pointer in ``Params::vectors``; ``block``: columns of a tile.
    """
    dtype = pipeline.tensor(view.of).dtype
    offset = sum(at.offset for at in view.at or ())
    start = f"(const char*)p.vectors[{index}] + {DTYPE_BYTES[dtype] * offset}"
    if not any(at.axes for at in view.at or ()):
        return f"v[{k}][0] = v[{k}][1] = Io<{dtype}>::param({start}, 0);"
    if offset % 2:
        return f"vector_pair<{dtype}, {size}>({start}, c, false, v[{k}][0], v[{k}][1]);"
    return f"Io<{dtype}>::param2({start}, {_inside(size, block)}, v[{k}][0], v[{k}][1]);"


def _inside(size: int, block: int) -> str:
    """Column ``c``, or the first where tiles go beyond the last one: nobody stores what becomes of those."""
    return "c" if size % block == 0 else f"c < {size} ? c : 0"


def _pair_beside(pipeline: Pipeline, op: TileOp, k: int, size: int) -> str:
    """Statement that loads columns ``c`` and ``c + 1`` of row ``row`` of what ``op`` loads into ``r``."""
    dtype = pipeline.tensor(op.params[0]).dtype
    start = f"(const char*)p.rows_of[{k}] + {DTYPE_BYTES[dtype]} * (u64)row * p.strides_of[{k}]"
    return f"Io<{dtype}>::param2({start}, {_inside(size, COLUMNS)}, r[{2 * k}], r[{2 * k + 1}]);"


def _in_registers(vectors: Sequence[View]) -> Callable[[View], str]:
    """An element of a vector that ``_vector`` has loaded."""
    return lambda view: f"v[{vectors.index(view)}][e]"


@lru_cache(maxsize=1)
def _template() -> jinja2.Template:
    return template("tiled_block.cu.j2")
