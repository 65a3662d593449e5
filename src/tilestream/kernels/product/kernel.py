"""Kernels of products: what both schedulers' families have in common, and the CUDA source that one generator makes of
either: constants, rows in front, epilogues; and its argument."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.ir.plain import plain
from tilestream.kernels.kernel import Footprint, Kernel
from tilestream.kernels.parts.mma import mixed, specialisation
from tilestream.kernels.parts.params import MAP, Field, Struct, at_least_one, pointers
from tilestream.kernels.parts.source import Call, KernelSource, Space
from tilestream.kernels.parts.templating import rendered
from tilestream.kernels.product.before import prefetch_code, row_code
from tilestream.kernels.product.epilogue import residuals, vectors_of
from tilestream.kernels.product.operands import Operands
from tilestream.kernels.product.shared_tile.code import SharedTileCode
from tilestream.kernels.product.shared_tile.model import SharedTile
from tilestream.kernels.product.tiled_block.code import TiledBlockCode
from tilestream.kernels.product.tiled_block.model import TiledBlock
from tilestream.kernels.shape import KernelShape, shape_of
from tilestream.kernels.stream.layout import SHARED_LIMIT

Schedule = TypeVar("Schedule", SharedTile, TiledBlock)
Code = SharedTileCode | TiledBlockCode
"""What a scheduler has of its own in the code of its kernels."""


class ProductKernel(Kernel, Generic[Schedule]):
    """The kernel of a launch of one stage that is a product, of the shape that its scheduler takes."""

    reads_columns = True
    shape: ClassVar[KernelShape]
    build: ClassVar[Callable[..., Any]]
    """Makes the schedule of a stage in plain form within a limit of shared memory: ``model.build``."""
    code: ClassVar[Callable[..., Code]]
    """What is written of a schedule, for a launch in plain form."""

    @classmethod
    def matches(cls, launch: Pipeline) -> bool:
        return shape_of(launch) is cls.shape

    def within(self, limit: int) -> Schedule:
        """Its schedule within ``limit`` bytes of shared memory; raises as ``model.build``."""
        written = plain(self.launch)
        return type(self).build(written.stages[0], written, limit)

    @cached_property
    def schedule(self) -> Schedule:
        return self.within(SHARED_LIMIT)

    def check(self) -> None:
        self.within(SHARED_LIMIT)

    def footprint(self, stage: Stage, limit: int) -> Footprint:
        s = self.within(limit)
        return Footprint(s.shared_bytes, s.registers, s.parts)

    def _emit(self, stamped: bool, annotate: bool) -> KernelSource:
        return emit(self.launch, type(self).code(self.schedule, plain(self.launch)))

    @property
    def space(self) -> Space:
        return self.schedule.space

    def pack(self, source: KernelSource, call: Call) -> bytes:
        code: Code = source.tables
        given = Operands(call, source.pipeline)
        rows = at_least_one([given.rows(op.params[0]) for op in code.b.loads], (0, 0, 0))
        return source.params.pack(
            **code.values(given),
            vectors=at_least_one([call.where[v.of].address for v in vectors_of(code.b)]),
            rows_of=[address for address, _, _ in rows],
            strides_of=[stride for _, stride, _ in rows],
            flags=call.at["flags"],
            dump=call.dump,
            limit_ns=call.timeout_ns,
            rows=call.part.rows,
        )

    def hosted(self, rows: int, sanitize: bool) -> str:
        return "the host build runs one launch" if len(self.parts(rows)) > 1 else ""


def argument(code: Code, vectors: int) -> Struct:
    """``Params`` of a kernel that reads so many vectors."""
    b = code.b
    loads = max(len(b.loads), 1)
    return Struct(
        "Params",
        (
            Field(MAP, "input"),
            *([Field(MAP, "firsts", len(b.firsts))] if b.firsts else []),
            Field(MAP, "lasts", len(b.lasts) * b.products),
            *code.maps(),
            Field("const void*", "vectors", max(vectors, 1)),
            Field("const void*", "rows_of", loads),
            Field("long long", "strides_of", loads),
            *pointers("operand_data"),
            *pointers("flags", type="u64*"),
            *pointers("dump", type="ExchangeDump*"),
            Field("u64", "limit_ns"),
            *code.fields(),
            Field("int", "rows"),
        ),
    )


def emit(pipeline: Pipeline, code: Code) -> KernelSource:
    """Generate the kernel of a launch that is a product.

    Raises:
        CompileError: a tile op has no CUDA snippet.
    """
    s, b, vectors = code.s, code.b, vectors_of(code.b)
    beside = residuals(b, pipeline, code.column, code.even_rows)
    shape = {
        "FIRSTS": len(b.firsts), "LASTS": len(b.lasts), "PRODUCTS": b.products, "INNER": b.sizes[0],
        "LOADS": len(beside.values), "BESIDE_WORDS": beside.count,
    }  # fmt: skip
    params = argument(code, len(vectors))
    in_front = len(vectors) - len(b.vectors(b.before))
    text = rendered(
        "product.cu.j2",
        pipeline,
        s=s,
        b=b,
        code=code,
        constants=({"bool": {"BEFORE": bool(b.before), "BY_COLUMNS": b.by_columns}, "int": shape}, code.constants()),
        params=params,
        mma=[(mixed if b.by_columns else specialisation)(b.dtype, n, code.starts) for n in code.blocks],
        beside=beside,
        before=row_code(b, pipeline, in_front, code.makers) if b.before else "",
        prefetch=prefetch_code(b, pipeline),
    )
    return KernelSource(pipeline, text, s.shared_bytes, params, code.register_splits, code)
