"""What a ragged pipeline asks of its kernel: what is read, which values a node and an edge have, passes over edges.

Its ops are in plain form. What is found is found by data flow alone. A value is of a node, of an edge, or of neither; a
sum over the edges is there only behind a pass over them, so a value's *depth* is how many passes come before it. An
edge's values of an earlier pass are computed again: what they are made of lies in the L2, and a node may have any
number of edges.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial
from math import prod
from typing import NoReturn

from tilestream.errors import VerifyError
from tilestream.ir.axes import COMBINES, At, Axis, View
from tilestream.ir.derive import WRITES
from tilestream.ir.pipeline import DTYPE_BYTES, INDEX_BYTES, Pipeline, Tensor, TileOp
from tilestream.ir.tileops import OPS
from tilestream.ir.ways import reached
from tilestream.kernels.segments.space import Space, space_of

READS = ("copy", "load")
ELEMENTWISE = ("unary", "binary")


class Place(StrEnum):
    """What a value belongs to: each edge, each node, or neither."""

    EDGE = "edge"
    NODE = "node"
    FIXED = "fixed"


@dataclass(frozen=True)
class Read:
    """Elements of a tensor's row, or of a tensor without rows, as a value.

    Attributes:
        number: of the tensor among the pipeline's.
        index: number of the tensor that names the row of an edge; -1 where rows come in order.
        columns: a coordinate for each dimension behind the rows.
        axes: sized axes of the value, in the order of the space.
        dtype: of the value, which is rounded where a product takes it.
    """

    tensor: Tensor
    number: int
    place: Place
    index: int
    columns: tuple[At, ...]
    axes: tuple[str, ...]
    dtype: str


@dataclass(frozen=True)
class Step:
    """An op with what it needs by name of value: reads are values too.

    Attributes:
        makes: the name of its value; of a store its tensor's.
        axes: sized axes of what it makes; ``taken``: those of what it is made of.
        depth: passes over edges before what it needs is there.
        write: where a store writes.
    """

    op: TileOp
    operands: tuple[str, ...]
    makes: str
    place: Place
    axes: tuple[str, ...]
    taken: tuple[str, ...]
    depth: int
    write: Read | None = None

    @property
    def dtype(self) -> str:
        return self.op.out.dtype if self.op.out is not None else ""


@dataclass(frozen=True)
class Pass:
    """One pass over a node's edges: what it reads of each, computes, sums up and stores."""

    reads: tuple[str, ...]
    steps: tuple[Step, ...]
    sums: tuple[Step, ...]
    stores: tuple[Step, ...]


@dataclass(frozen=True)
class Program:
    """All of it; names of values map to reads or steps.

    Attributes:
        bounds, busy: numbers of the tensors with bounds and busy nodes (-1: none).
        sums: over edges, by the name of what they make; those of a constant are a multiple of the number of edges.
        nodes: steps of nodes, in order, stores among them.
        fixed: steps that neither edges nor nodes change.
    """

    pipeline: Pipeline
    space: Space
    bounds: int
    busy: int
    edges: str
    reads: Mapping[str, Read]
    steps: Mapping[str, Step]
    fixed: tuple[Step, ...]
    nodes: tuple[Step, ...]
    sums: Mapping[str, Step]
    counted: Mapping[str, float]
    passes: tuple[Pass, ...]

    def value(self, name: str) -> Read | Step:
        """What a value is, by name."""
        return self.reads[name] if name in self.reads else self.steps[name]

    def axes(self, value: str) -> tuple[str, ...]:
        """Sized axes of a value."""
        return self.value(value).axes

    def rounds(self, value: str) -> str:
        """The dtype that a value is rounded to where a product takes it; empty where it has it already."""
        if value in self.reads:
            read = self.reads[value]
            return "" if read.dtype in ("f32", read.tensor.dtype) else read.dtype
        step = self.steps[value]
        return "" if step.dtype == "f32" or step.op.kind == "cast" else step.dtype

    @property
    def stores(self) -> list[Step]:
        return [s for s in (*self.nodes, *(s for each in self.passes for s in each.stores)) if s.write is not None]


def made_of(steps: Mapping[str, Step], value: str) -> tuple[str, ...]:
    """The values that a value is made of; none of one that is read."""
    return steps[value].operands if value in steps else ()


def program(launch: Pipeline) -> Program:
    """The program of a ragged launch.

    Raises:
        VerifyError: no kernel of this family does it, with the user's line.
    """
    return _Reader(launch).program()


class _Reader:
    def __init__(self, launch: Pipeline) -> None:
        self.p = launch
        ragged = self.p.ragged
        if len(ragged) != 1 or len(self.p.stages) != 1:
            self._no(f"pipeline {self.p.name!r} has {len(ragged)} ragged axes in {len(self.p.stages)} stages")
        (self.edges,) = ragged
        axis: Axis = ragged[self.edges]
        self.nodes = axis.of
        self.numbers = {t.name: n for n, t in enumerate(self.p.tensors)}
        self.bounds = self.numbers[axis.bounds]
        self.busy = self.numbers.get(f"{axis.bounds}.busy", -1)
        self.space = space_of(self.p, self.nodes, self.edges)
        self.reads: dict[str, Read] = {}
        self.steps: dict[str, Step] = {}
        self.sums: dict[str, Step] = {}
        self.stored: list[Step] = []

    def program(self) -> Program:
        for op in self.p.stages[0].ops:
            self._take(op)
        counted = {name: value for name, s in self.sums.items() if (value := self._constant(s)) is not None}
        steps = list(self.steps.values())
        return Program(
            self.p, self.space, self.bounds, self.busy, self.edges, self.reads, self.steps,
            tuple(s for s in steps if s.place is Place.FIXED),
            tuple(s for s in [*steps, *self.stored] if s.place is Place.NODE),
            self.sums, counted, self._passes(counted),
        )  # fmt: skip

    def _no(self, why: str, op: TileOp | None = None) -> NoReturn:
        where = f" ({op.source})" if op is not None and op.source else ""
        raise VerifyError(why + where, "leave it to the operators that it is made of")

    # -- ops

    def _take(self, op: TileOp) -> None:
        kind = op.kind
        if kind in WRITES:
            return self._store(op)
        assert op.out is not None
        for v in op.views[: len(op.tiles)]:
            self._own_axes(v, op)
        operands = (*op.ins, *(self._read(v, op) for v in op.views[len(op.tiles) :]))
        axes = self.space.axes_of(op.out)
        place = self._place(op.out.axes)
        if kind == "product":
            return self._product(op, operands, place, axes)
        if kind in READS and operands[0] in self.reads and self.reads[operands[0]].axes == axes:
            self.reads[op.out.name] = replace(self.reads.pop(operands[0]), dtype=op.out.dtype)
            return None
        if kind not in (*READS, "fill") and OPS[kind].family not in ELEMENTWISE:
            self._no(f"its kernel has no op {kind!r}", op)
        self._add(op, operands, place, axes)

    def _add(self, op: TileOp, operands: tuple[str, ...], place: Place, axes: tuple[str, ...]) -> Step:
        assert op.out is not None
        lacking = [a for name in operands for a in self._value(name).axes if a not in axes]
        if lacking and op.kind != "product":
            self._no(f"{op.kind} of an operand along {lacking[0]!r}, which its result lacks", op)
        step = Step(op, operands, op.out.name, place, axes, self._taken(operands), self._depth(operands))
        self.steps[step.makes] = step
        return step

    def _product(self, op: TileOp, operands: tuple[str, ...], place: Place, axes: tuple[str, ...]) -> None:
        if op.combine not in COMBINES:
            self._no(f"its kernel has no {op.combine!r} of products", op)
        over_edges = place is not Place.EDGE and any(self._is_of_edges(name) for name in operands)
        if place is Place.FIXED and any(self._value(name).place is not Place.FIXED for name in operands):
            self._no("a sum over nodes", op)
        taken = self._taken(operands)
        if any(a not in taken for a in axes):
            self._no("a product that is wider than what it multiplies", op)
        if taken != axes and not (taken == self.space.axes and axes in ((), self.space.prefix)):
            self._no(f"a {op.combine} over {', '.join(a for a in taken if a not in axes)} alone", op)
        if op.combine == "softmax" and (not over_edges or len(operands) < 2 or taken != axes):
            self._no("a softmax that is not over edges alone", op)
        step = self._add(op, operands, place, axes)
        if over_edges:
            self.sums[step.makes] = step

    def _store(self, op: TileOp) -> None:
        if op.kind != "store":
            self._no(f"its kernel has no op {op.kind!r}", op)
        self._own_axes(op.views[0], op)
        value, view = op.ins[0], op.views[-1]
        write = self._reading(view, self._value(value).axes, op)
        if write.place is not self._value(value).place or write.place is Place.FIXED:
            self._no(f"a store of {self._value(value).place} values to {write.place} rows", op)
        if set(write.axes) != set(self._value(value).axes):
            self._no("a store of a value that is spread", op)
        self.stored.append(
            Step(op, (value,), view.of, write.place, write.axes, write.axes, self._depth((value,)), write)
        )

    # -- values

    def _value(self, name: str) -> Read | Step:
        return self.reads[name] if name in self.reads else self.steps[name]

    def _taken(self, operands: Sequence[str]) -> tuple[str, ...]:
        return tuple(a for a in self.space.axes if any(a in self._value(name).axes for name in operands))

    def _is_of_edges(self, value: str) -> bool:
        return self._value(value).place is Place.EDGE

    def _place(self, axes: Sequence[Axis]) -> Place:
        names = [a.name for a in axes]
        return Place.EDGE if self.edges in names else Place.NODE if self.nodes in names else Place.FIXED

    def _depth(self, operands: Sequence[str]) -> int:
        depths = [self.steps[n].depth + (n in self.sums) for n in operands if n in self.steps]
        return max(depths, default=0)

    def _own_axes(self, view: View, op: TileOp) -> None:
        if view.at is not None and any(len(at.axes) > 1 or at.offset or at.index or at.strides for at in view.at):
            self._no(f"tile {view.of!r} under other coordinates than its own", op)

    # -- tensors

    def _read(self, view: View, op: TileOp) -> str:
        """The name of the value that a view of a tensor is."""
        assert op.out is not None
        made = self._reading(view, None, op)
        name = f"{view.of} of {op.out.name}"
        self.reads[name] = made
        return name

    def _reading(self, view: View, axes: Sequence[str] | None, op: TileOp) -> Read:
        tensor = self.p.tensor(view.of)
        at = view.at or ()
        if tensor.dtype not in DTYPE_BYTES:
            self._no(f"tensor {tensor.name!r} of {tensor.dtype} as numbers", op)
        row = at[0] if at else At()
        place = Place.EDGE if row.axes == (self.edges,) else Place.NODE if row.axes == (self.nodes,) else Place.FIXED
        if place is not Place.FIXED:
            plain_row = not (row.offset or row.strides) and (place is Place.EDGE or not row.index)
            if not plain_row or (row.index and self.p.tensor(row.index).dtype not in INDEX_BYTES):
                self._no(f"rows of tensor {tensor.name!r} under other coordinates than an index's", op)
            at = at[1:]
        sizes = [a.size for a in tensor.axes[len(tensor.axes) - len(at) :]]
        if any(size is None for size in sizes) or any(c.index or c.strides or len(c.axes) > 1 for c in at):
            self._no(f"columns of tensor {tensor.name!r} under other coordinates than their own", op)
        columns = tuple(self.space.column(c) for c in at)
        found = tuple(a for a in self.space.axes if any(a in c.axes for c in columns))
        if any(c.axes and c.axes[0] not in self.space.axes for c in columns):
            self._no(f"columns of tensor {tensor.name!r} under other axes than its rows'", op)
        index = self.numbers[row.index] if place is Place.EDGE and row.index else -1
        return Read(tensor, self.numbers[tensor.name], place, index, columns, found, tensor.dtype)

    # -- passes

    def _constant(self, step: Step) -> float | None:
        """What every edge adds to a sum, where that is one number."""
        makers = [self.steps.get(name) for name in step.operands]
        if step.op.combine != "sum" or len(makers) != 1 or makers[0] is None or makers[0].op.kind != "fill":
            return None
        width = prod(self.space.sizes[a] for a in makers[0].axes if a not in step.axes)
        return float(makers[0].op.attr("value", 1.0) or 0.0) * width

    def _passes(self, counted: Mapping[str, float]) -> tuple[Pass, ...]:
        """A sum that no pass needs may wait for one that reads what it is made of anyway."""
        ends = [s for name, s in self.sums.items() if name not in counted]
        ends += [s for s in self.stored if s.place is Place.EDGE]
        count = 1 + max((s.depth for s in ends), default=-1)
        taken = {name for s in ends for name in self._behind(s.operands)}
        waiting = [s for s in ends if s.makes not in taken and s.depth < count - 1]
        each = [[s for s in ends if s.depth == k and s not in waiting] for k in range(count)]
        for s in waiting:
            reads = [self._behind(name for e in here for name in e.operands) & self.reads.keys() for here in each]
            own = self._behind(s.operands) & self.reads.keys()
            each[min(range(s.depth, count), key=lambda k: len(own - reads[k]))].append(s)
        return tuple(map(self._pass, each))

    def _behind(self, names: Iterable[str]) -> set[str]:
        """Values, and all that they are made of."""
        return reached(names, partial(made_of, self.steps))

    def _pass(self, ends: Sequence[Step]) -> Pass:
        def of_edges(names: Iterable[str]) -> list[str]:
            return [name for name in names if self._is_of_edges(name)]

        operands = of_edges(name for s in ends for name in s.operands)
        wanted = reached(operands, lambda name: of_edges(made_of(self.steps, name)))
        return Pass(
            tuple(name for name in self.reads if name in wanted),
            tuple(s for name, s in self.steps.items() if name in wanted),
            tuple(s for s in ends if s.write is None),
            tuple(s for s in ends if s.write is not None),
        )
