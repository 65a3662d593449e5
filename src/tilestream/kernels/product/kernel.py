"""Kernels of products: what both schedulers' families have in common."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any, ClassVar, Generic, TypeVar

from tilestream.ir.pipeline import Pipeline, Stage
from tilestream.ir.plain import plain
from tilestream.kernels.kernel import Footprint, Kernel
from tilestream.kernels.parts.source import Call, KernelSource, Space
from tilestream.kernels.product.emit import Code, emit, pack
from tilestream.kernels.product.shared_tile.model import SharedTile
from tilestream.kernels.product.tiled_block.model import TiledBlock
from tilestream.kernels.shape import KernelShape, shape_of
from tilestream.kernels.stream.layout import SHARED_LIMIT

Schedule = TypeVar("Schedule", SharedTile, TiledBlock)


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
        return pack(source, call)

    def hosted(self, rows: int, sanitize: bool) -> str:
        return "the host build runs one launch" if len(self.parts(rows)) > 1 else ""
