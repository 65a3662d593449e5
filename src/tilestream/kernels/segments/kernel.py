"""The family of segments: for each node what the values of its edges sum to."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from math import ceil, prod

from tilestream.devices import Device
from tilestream.errors import InputError, TilestreamError
from tilestream.ir.lengths import EDGES_A_NODE, Lengths
from tilestream.ir.pipeline import DTYPE_BYTES, Pipeline, Role, Stage
from tilestream.kernels.costs import Counts
from tilestream.kernels.kernel import NO_ROW, Footprint, Frame, Kernel, halves
from tilestream.kernels.operators.lanes import WORDS
from tilestream.kernels.parts.params import Field, Struct
from tilestream.kernels.parts.source import Call, KernelSource, Part, Space
from tilestream.kernels.parts.templating import rendered
from tilestream.kernels.segments.code import Code
from tilestream.kernels.segments.cost import cost
from tilestream.kernels.segments.layout import LONG, PIECE_EDGES, SLOTS, THREADS, WARP, Layout, layout
from tilestream.kernels.segments.model import Program, program

CTAS_PER_SM = 4, 160
"""Of a launch, at least: as many as take busy nodes where there are few nodes; and at most: where most nodes have no
edge, a CTA is over before the next one's bounds are here, so each has several."""
UNKNOWN = 2**31 - 1
MOST_STRIDE = 2**32 - 1
"""Bytes from row to row: a row's place is one multiplication of 32 bits, of which a lane makes one for each row."""
HOST_LANES = 64


class SegmentsKernel(Kernel):
    """The kernel of a launch of one stage with a ragged axis."""

    family = "segments"
    starts_early = True

    @classmethod
    def matches(cls, launch: Pipeline) -> bool:
        return bool(launch.ragged)

    @cached_property
    def program(self) -> Program:
        """Raises ``VerifyError``."""
        return program(self.launch)

    @cached_property
    def layout(self) -> Layout:
        """Raises ``VerifyError``."""
        return layout(self.program)

    @cached_property
    def code(self) -> Code:
        return Code(self.layout)

    def check(self) -> None:
        assert self.layout

    @property
    def sums(self) -> int:
        """Floats of a lane's sums, in the pass that has most."""
        return max((each.count for each in self.code.passes), default=0)

    @property
    def shared_bytes(self) -> int:
        """What the warps of a CTA leave each other of a busy node."""
        return 4 * (THREADS // WARP) * self.layout.lanes * max(1, self.sums)

    def footprint(self, stage: Stage, limit: int) -> Footprint:
        size = self.shared_bytes
        return Footprint(size, self.layout.registers, (("sums of a busy node", size),))

    def cost(self, rows: int, device: Device, edges: int | None = None, lengths: Lengths | None = None) -> Counts:
        """On ``rows`` nodes; of ``edges``, or of as many as nodes are assumed to have (``ir.lengths.EDGES_A_NODE``).
        Without ``lengths`` each edge is at any node."""
        edges = EDGES_A_NODE * rows if edges is None else edges
        return cost(self.layout, rows, edges, device, lengths)

    def _emit(self, stamped: bool, annotate: bool) -> KernelSource:
        code, space = self.code, self.program.space
        text = rendered(
            "segments.cu.j2", self.launch, code=code, at=self.layout, runs=space.runs, run=space.run, threads=THREADS,
            host_threads=HOST_LANES, slots=SLOTS, long=LONG, piece=PIECE_EDGES, params=self.argument,
            resident=self.layout.resident, most_sums=max(1, self.sums),
        )  # fmt: skip
        return KernelSource(self.launch, text, self.shared_bytes, self.argument, ((0, 0),))

    @cached_property
    def argument(self) -> Struct:
        count = len(self.launch.tensors)
        names = ", ".join(f"{n} {t.name}" for n, t in enumerate(self.launch.tensors)).replace("\\", "/")
        return Struct(
            "Params",
            (
                Field("void*", "tensors", count, note=names),
                Field("u32", "strides", count, note="bytes from row to row"),
                Field("long long", "rows", count),
                Field("const int*", "starts"),
                Field("const int*", "busy", note="or null"),
                Field("float*", "partials"),
                Field("u32*", "arrived"),
                Field("float*", "merged", note="sums of earlier passes over busy nodes"),
                Field("u64*", "record"),
                Field("int", "nodes"),
                Field("int", "edges"),
                Field("int", "phase", note="passes over busy nodes that are done"),
            ),
        )

    @cached_property
    def frame(self) -> Frame:
        told = "as many as nodes take"
        return Frame(1, told, THREADS, warpgroups=0, together=False, words=WORDS, host_lanes=HOST_LANES)

    def grid(self, rows: int, sms: int) -> int:
        """CTAs of a launch on ``rows`` nodes."""
        least, most = (each * sms for each in CTAS_PER_SM)
        return min(most, max(least, ceil(rows * self.layout.team / THREADS)))

    @cached_property
    def space(self) -> Space:
        """Partial sums of nodes that several CTAs share, how many of a node's pieces have come, and their sums."""
        slots = SLOTS if self.program.busy >= 0 else 1
        partials = 4 * slots * self.layout.lanes * max(1, self.sums)
        merged = partials * len(self.code.passes) if len(self.code.passes) > 1 else 4
        parts = (("partials", partials), ("arrived", 4 * slots), ("merged", merged))
        return Space(parts, frozenset(("arrived",)))

    def parts(self, rows: int) -> list[Part]:
        """All nodes, and again those that several CTAs share, for each further pass over their edges."""
        further = range(1, len(self.code.passes)) if self.program.busy >= 0 else ()
        return [Part(0, rows, rows), *(Part(0, 0, rows, phase) for phase in further)]

    def pack(self, source: KernelSource, call: Call) -> bytes:
        tensors, p = self.launch.tensors, self.program
        where = [call.where[t.name] for t in tensors]
        strides = []
        for t, at in zip(tensors, where, strict=True):
            size = DTYPE_BYTES.get(t.dtype, 0)
            # Only rows of matrices may lie apart.
            is_matrix = len(t.axes) == 2 and t.role is not Role.OUTPUT
            row = t.shape if t.axes and t.axes[0].size is None else t.shape[1:]
            strides.append(size * (at.stride if is_matrix else prod(row)))
            if strides[-1] > MOST_STRIDE:
                raise InputError(
                    f"rows of tensor {t.name!r} of pipeline {self.launch.name!r} lie {strides[-1]} bytes apart",
                    "make it contiguous",
                )
        edges = next(
            (at.rows for t, at in zip(tensors, where, strict=True) if t.axes and t.axes[0].name == p.edges), UNKNOWN
        )
        busy = where[p.busy] if p.busy >= 0 else None
        return source.params.pack(
            tensors=[at.address for at in where], strides=strides, rows=[at.rows for at in where],
            starts=where[p.bounds].address, busy=busy.address if busy else 0,
            partials=call.at["partials"], arrived=call.at["arrived"], merged=call.at["merged"],
            record=call.dump, nodes=call.part.rows, edges=edges, phase=call.part.phase,
        )  # fmt: skip

    def error(self, words: Sequence[int]) -> TilestreamError:
        return InputError(self.describe(words), NO_ROW)

    def describe(self, words: Sequence[int]) -> str:
        (what, at), rows, found = halves(words, 2)[1], words[2], words[3]
        tensors = self.launch.tensors
        if what >= len(tensors):
            name = tensors[self.program.bounds].name
            return f"bounds {name!r} of pipeline {self.launch.name!r}: those of position {at} are {rows} to {found}"
        return (
            f"index {tensors[what].name!r} of pipeline {self.launch.name!r} is {found} at edge {at}, and the rows that"
            f" it names are {rows}"
        )
