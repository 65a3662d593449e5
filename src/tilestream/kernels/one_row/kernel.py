"""The family of one row: a tile of one row, whose products' columns the CTAs of the grid divide."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

from tilestream.devices import Device
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, Role, Stage
from tilestream.kernels.costs import Amount, ClosedForm, Counts
from tilestream.kernels.kernel import Footprint, Frame, Kernel
from tilestream.kernels.one_row.code import Code, row_bytes
from tilestream.kernels.one_row.model import OneRow, find
from tilestream.kernels.parts.params import Field, Struct
from tilestream.kernels.parts.source import Call, KernelSource, Part
from tilestream.kernels.parts.templating import rendered

REGISTERS = 128
SUM_S = 0.3e-6
"""Of a sum over a row by a CTA, a barrier of its included. Assumed."""


class OneRowKernel(Kernel):
    """The kernel of a launch of one stage that takes one row at a time; of several rows, a launch each."""

    family = "one row"
    closed_form = ClosedForm("launches of one row", 0.5, "assumed: none is timed yet")
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
        """Weights are on their way while rows are made, of which one CTA's are in the L2."""
        sums = sum(op.kind in ("sum", "max") for op in self.row.front)
        bytes_ = row_bytes(self.launch, self.row)
        made = Counts("row", (Amount("first loads", device.load_s), Amount("sums of the row", sums * SUM_S)))
        weights = Amount("weights", bytes_, device.dram_bytes_per_s)
        parts = (Amount("launch", device.launch_s), Counts("row and weights", (made, weights)))
        return Counts(self.family, parts, times=max(rows, 0))

    def _emit(self, stamped: bool, annotate: bool) -> KernelSource:
        code = self.code
        text = rendered(
            "one_row.cu.j2", self.launch, code=code, row=self.row, params=self.argument, threads=32 * code.warps,
            parts=[(part, code.weights(part), *code.beside(part)) for part in code.parts],
        )  # fmt: skip
        return KernelSource(self.launch, text, code.shared_bytes, self.argument, ((0, 0),))

    @cached_property
    def argument(self) -> Struct:
        count = len(self.launch.tensors)
        names = ", ".join(f"{n} {t.name}" for n, t in enumerate(self.launch.tensors)).replace("\\", "/")
        return Struct(
            "Params",
            (
                Field("void*", "tensors", count, note=names),
                Field("long long", "strides", count, note="bytes from row to row"),
            ),
        )

    @cached_property
    def frame(self) -> Frame:
        ctas, threads = self.launch.stages[0].replicas, 32 * self.code.warps
        return Frame(ctas, "as many as divide the columns", threads, 1, 0, False, 0, host_lanes=threads)

    def parts(self, rows: int) -> list[Part]:
        return [Part(first, 1, rows) for first in range(rows)]

    def pack(self, source: KernelSource, call: Call) -> bytes:
        tensors, strides = [], []
        for t in self.launch.tensors:
            at = call.where[t.name]
            strides.append(at.stride * DTYPE_BYTES[t.dtype])
            tensors.append(at.address + (0 if t.role is Role.PARAMETER else call.part.first * strides[-1]))
        return source.params.pack(tensors=tensors, strides=strides)

    def describe(self, words: Sequence[int]) -> str:
        raise NotImplementedError("it waits for nobody")
