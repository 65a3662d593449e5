"""The family of one row: a tile of one row, whose products' columns the CTAs of the grid divide."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tilestream.devices import Device
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, Role, Stage
from tilestream.kernels.costs import Amount, ClosedForm, Counts
from tilestream.kernels.kernel import Footprint, Frame, Kernel
from tilestream.kernels.one_row.code import Code
from tilestream.kernels.one_row.model import OneRow, find
from tilestream.kernels.parts.params import Field, Struct
from tilestream.kernels.parts.source import Call, KernelSource, Part
from tilestream.kernels.parts.templating import rendered

REGISTERS = 128
SUM_S = 0.45e-6
"""Of a sum over a row by a CTA, a barrier of its included. Fitted by hand to five launches of RWKV-4 169M, each timed
once on an H200: 2.0 us for 768 -> 768 with a residual and 3.7 for 3,072 -> 768, no sum in front; 4.3 for 768 -> 3,072
and 768 -> 768, 4.7 for three products of 768 with the WKV behind, and 21.4 for the head of 50,277 columns, a LayerNorm
in front of each. Their predictions are 2.8, 3.6, 4.8, 4.2 and 21.4."""


class OneRowKernel(Kernel):
    """The kernel of a launch of one stage that takes one row at a time; of several rows, a launch each."""

    family = "one row"
    closed_form = ClosedForm("launches of one row", 0.13, "the five that it was fitted on")
    starts_early = True

    @classmethod
    def matches(cls, launch: Pipeline) -> bool:
        return len(launch.stages) == 1 and not launch.ragged and launch.stages[0].blocks.get("rows") == 1

    @cached_property
    def row(self) -> OneRow:
        return find(self.launch)

    @cached_property
    def code(self) -> Code:
        return Code(self.launch, self.row, self.launch.stages[0].replicas)

    def check(self) -> None:
        assert self.row

    def footprint(self, stage: Stage, limit: int) -> Footprint:
        size = self.code.shared_bytes
        return Footprint(size, REGISTERS, (("rows", size),))

    def cost(self, rows: int, device: Device) -> Counts:
        """A launch includes the first loads."""
        sums = sum(op.kind in ("sum", "max") for op in self.row.front)
        columns = sum(g.columns * len(g.products) for g in self.row.groups)
        weights = Amount("weights", DTYPE_BYTES[self.row.dtype] * self.row.depth * columns, device.dram_bytes_per_s)
        parts = (Amount("launch", device.launch_s), Amount("sums of the row", sums * SUM_S), weights)
        return Counts(self.family, parts, times=rows)

    def _emit(self, stamped: bool, annotate: bool) -> KernelSource:
        code = self.code
        parts = [(part, code.weights(part.group), *code.beside(part.group)) for part in code.parts]
        text = rendered("one_row.cu.j2", self.launch, code=code, row=self.row, params=self.argument, parts=parts)
        return KernelSource(self.launch, text, code.shared_bytes, self.argument, ((0, 0),))

    @cached_property
    def argument(self) -> Struct:
        count = len(self.launch.tensors)
        names = ", ".join(f"{n} {t.name}" for n, t in enumerate(self.launch.tensors)).replace("\\", "/")
        strides = Field("long long", "strides", count, note="bytes from row to row")
        return Struct("Params", (Field("void*", "tensors", count, note=names), strides))

    @cached_property
    def frame(self) -> Frame:
        ctas, threads = self.launch.stages[0].replicas, 32 * self.code.warps
        return Frame(ctas, "as many as divide the columns", threads, 1, 0, False, 0, host_lanes=threads)

    def parts(self, rows: int) -> list[Part]:
        return [Part(first, 1, rows) for first in range(rows)]

    def pack(self, source: KernelSource, call: Call) -> bytes:
        where = [(t, call.where[t.name]) for t in self.launch.tensors]
        strides = [at.stride * DTYPE_BYTES[t.dtype] for t, at in where]
        first = [
            0 if t.role is Role.PARAMETER else call.part.first * s for (t, _), s in zip(where, strides, strict=True)
        ]
        tensors = [at.address + n for (_, at), n in zip(where, first, strict=True)]
        return source.params.pack(tensors=tensors, strides=strides)

    def describe(self, words: Sequence[int]) -> str:
        raise NotImplementedError("it waits for nobody")
