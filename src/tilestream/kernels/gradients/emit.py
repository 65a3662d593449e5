"""The CUDA source of a launch of gradients: what is alike among its stages as kinds, the rest as lines of tables."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod
from typing import NamedTuple

from tilestream.errors import VerifyError
from tilestream.ir.pipeline import Pipeline
from tilestream.kernels.gradients.body import body, products
from tilestream.kernels.gradients.layouts import COLUMNS, Box, Held
from tilestream.kernels.gradients.model import Schedule, builds
from tilestream.kernels.parts.params import MAP, Field, Struct, pointers
from tilestream.kernels.parts.source import KernelSource
from tilestream.kernels.parts.templating import rendered
from tilestream.kernels.stream.places import splits_for

THREADS = 384
ADDING = 256
"""Threads of a CTA that add partial sums."""
MOST_LOADS = 22
"""Partial sums under way in one of them at once."""
MOST_PARTIALS = 2**31 - 1
"""Partial results are counted in fours of floats by 32 bits."""
TYPES = ("bf16", "f16", "f32")
"""Of a ``Result``, by number."""


class Operands(NamedTuple):
    """What the packer reads: what bulk copies read or write, [rows, features] or weights, and what goes otherwise."""

    maps: tuple[str, ...]
    pointers: tuple[str, ...]


def argument(operands: Operands) -> Struct:
    """``Params`` of a kernel with these operands."""
    maps, written = operands
    each = (
        Field(MAP, "maps", max(len(maps), 1)),
        Field("void*", "pointers", len(written)),
        Field("long long", "strides", len(written)),
        *pointers("flags", type="u64*"),
        *pointers("dump", type="Dump*"),
        Field("u64", "limit_ns"),
        *pointers("partials", type="float*"),
        Field("int", "rows"),
    )
    return Struct("Params", each)


def emit(pipeline: Pipeline) -> KernelSource:
    """Generate the kernel of a launch of gradients; its stages run side by side.

    Raises:
        VerifyError: from the schedule, naming the user's line; or partial results are more than 32 bits count.
    """
    schedules = builds(pipeline)
    partials = sum(s.workspace_bytes for s in schedules) // 16
    if partials > MOST_PARTIALS:
        what = f"pipeline {pipeline.name!r} has {partials} x 16 bytes of partial results > {MOST_PARTIALS} x 16"
        raise VerifyError(what, "use fewer splits")
    tables = _Tables(pipeline, schedules)
    loads = max(ceil(s.splits / (ADDING // width(s))) for s in schedules)
    each = [tables.kind(s) for s in schedules]
    kinds = [kind for n, kind in enumerate(each) if kind not in each[:n]]
    stages = [tables.stage(s, kinds.index(kind)) for s, kind in zip(schedules, each, strict=True)]
    operands = Operands(tables.maps, tables.pointers)
    params = argument(operands)
    text = rendered(
        "gradients.cu.j2", pipeline, threads=THREADS, kinds=kinds, loads=loads, stages=stages,
        boxes=tables.boxes, results=tables.results, params=params,
        most_results=max(sum(h.groups for h in s.layout.held) for s in schedules),
        mma=list(dict.fromkeys(m for s in schedules for m in products(s))),
    )  # fmt: skip
    registers = max(s.layout.registers for s in schedules)
    shared = max(s.shared_bytes for s in schedules)
    return KernelSource(pipeline, text, shared, params, splits_for(registers), operands)


def width(s: Schedule) -> int:
    """Fours of sums that a CTA adds at once: all of its part, where threads are left for ``MOST_LOADS`` each."""
    most = ADDING // ceil(s.splits / MOST_LOADS)
    mine = ceil(s.fours / s.splits)
    return ceil(mine / ceil(mine / most))


class _Tables:
    """Tensors by place in the argument; what fills chunks of shared memory and where sums go, stage after stage."""

    def __init__(self, pipeline: Pipeline, schedules: Sequence[Schedule]) -> None:
        self.pipeline = pipeline
        odd = [name for s in schedules for name in s.odd]
        read = [name for s in schedules for name in (*s.streams, *s.weights) if name not in odd]
        made = [s.chain.result for s in schedules if s.chain.result]
        self.maps = tuple(dict.fromkeys([*read, *made]))
        self.pointers = tuple(dict.fromkeys([*odd, *(h.tensor for s in schedules for h in s.layout.held)]))
        self.boxes: list[tuple[int, ...]] = []
        self.results: list[tuple[int, ...]] = []
        self.first = self.partials = 0

    def kind(self, s: Schedule) -> dict[str, object]:
        """Constants and code (``struct Kind`` of the template), which several stages may share."""
        at = s.layout
        return {
            "dtype": s.dtype, "groups": at.groups, "rings": at.rings, "slots": s.slots, "left": at.left,
            "right": at.right, "step_slots": len(at.slots), "step_tiles": at.step_tiles, "weights": len(at.weights),
            "bias": any(h.is_bias for h in at.held), "odd": bool(s.odd), "ring": s.at("rings"), "ones": s.at("ones"),
            "bars": s.at("barriers"), "body": body(s, self.maps.index(s.chain.result) if s.chain.result else -1),
        }  # fmt: skip

    def stage(self, s: Schedule, kind: int) -> dict[str, int]:
        """A line of the table of stages, whose lines of the other tables are added."""
        block, weights = s.block, sum(h.fours for h in s.layout.held if not h.is_bias)
        line = {
            "kind": kind, "first": self.first, "parts": prod(s.parts), "k_parts": s.parts[1], "splits": s.splits,
            "out_step": block[0], "k_step": block[1], "boxes": len(self.boxes), "results": len(self.results),
            "partials": self.partials, "fours": s.fours, "weight_fours": weights, "width": width(s),
        }  # fmt: skip
        self.boxes += [self._box(box) for box in (*s.layout.weights, *(box for slot in s.layout.slots for box in slot))]
        self.results += [self._result(s, h, group) for h in s.layout.held for group in range(h.groups)]
        self.first += s.ctas
        self.partials += s.workspace_bytes // 16
        return line

    def _box(self, box: Box) -> tuple[int, ...]:
        bulk = box.tensor in self.maps
        place = (self.maps.index(box.tensor), -1) if bulk else (-1, self.pointers.index(box.tensor))
        return *place, self.pipeline.tensor(box.tensor).features, box.column, box.row

    def _result(self, s: Schedule, h: Held, group: int) -> tuple[int, ...]:
        layer = s.chain.layers[h.layer]
        step = 8 * h.blocks * group if h.across else 0
        return (
            h.first + h.part * (group + 1), TYPES.index(h.dtype), 2 if h.is_bias else int(h.turned),
            self.pointers.index(h.tensor), layer.out, layer.k, 0 if h.across else COLUMNS * group,
            COLUMNS * h.chunk + step,
        )  # fmt: skip
