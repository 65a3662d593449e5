"""Ops of rows as indexed reductions: every tile with named axes, every operand with explicit coordinates.

A row pipeline says what its ops do (``linear``, ``layer_norm``, ``cat``, a vector that broadcasts) and leaves columns
without names. Here they get them: an op that makes columns names an axis after its tile, other ops keep their widest
operand's. What is derived (``ir.derive``) is derived from this form; schedules and kernels are made from the other.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tilestream.ir.axes import ROWS, At, Axis, Loop, Spread, View, along
from tilestream.ir.columns import column_axis, first_column, looped_layers
from tilestream.ir.macros import expand
from tilestream.ir.once import once
from tilestream.ir.pipeline import Pipeline, Stage, Tensor, Tile, TileOp
from tilestream.ir.taps import Tap
from tilestream.ir.tileops import OPS
from tilestream.ir.ways import producers_first

ROW = At((ROWS.name,))


def is_plain(op: TileOp) -> bool:
    """Whether all operands of ``op`` have coordinates."""
    return all(v.at is not None for v in op.views)


@once
def by_rows(p: Pipeline) -> bool:
    """Whether ``p`` is written in ops of rows, streamed by every stage, which kernels can be made of."""
    rows = all(s.loops and s.loops[0].axis == ROWS.name and _of_columns(s) for s in p.stages)
    return rows and not any(v.at is not None for s in p.stages for op in s.ops for v in op.views)


def _of_columns(stage: Stage) -> bool:
    """Whether all loops inside the one over rows are over columns of tiles."""
    return {loop.axis for loop in stage.loops[1:]} <= {column_axis(name) for name in stage.defined()}


@once
def plain(p: Pipeline) -> Pipeline:
    """The same pipeline with ops of rows written out. Ops that have coordinates already stay as they are."""
    writer = _Writer({t.name: t for t in p.tensors})
    stages: dict[str, Stage] = {}
    for stage in producers_first(p):  # so that a queue's tile has its axes where it is taken
        ops = tuple(writer.stage(stage))
        stages[stage.name] = replace(stage, ops=ops, mesh=tuple(_over_columns(d, ops) for d in stage.mesh))
    tensors = tuple(_named(t) for t in p.tensors)
    written = replace(p, tensors=tensors, stages=tuple(stages[s.name] for s in p.stages))
    sums = next((op for s in p.stages for op in s.ops if op.receivers), None)
    if sums is not None:
        written = _of_nodes(written, p.tensor(sums.params[0]).axes[0].name, sums.params[2])
    return p if written == p else written  # what is known of it need not be found again


def _of_nodes(p: Pipeline, nodes: str, starts: str) -> Pipeline:
    """Rows as a ragged axis: those of each of ``nodes`` start where ``starts`` says."""
    rows = replace(ROWS, of=nodes, bounds=starts)

    def ragged(of: Tensor | Tile) -> Any:
        return replace(of, axes=tuple(rows if a == ROWS else a for a in of.axes))

    def stage(s: Stage) -> Stage:
        ops = tuple(op if op.out is None else replace(op, out=ragged(op.out)) for op in s.ops)
        mesh = tuple(replace(d, axes=tuple(nodes if a == ROWS.name else a for a in d.axes)) for d in s.mesh)
        return replace(s, ops=ops, loops=(Loop(nodes, 1), *s.loops), mesh=mesh)

    return replace(p, tensors=tuple(map(ragged, p.tensors)), stages=tuple(map(stage, p.stages)))


def _named(t: Tensor) -> Tensor:
    """Dimensions of a tensor that have no name get one of the tensor's own."""
    return replace(t, axes=tuple(a if a.name else Axis(f"{t.name}.{i}", a.size) for i, a in enumerate(t.axes)))


def _over_columns(d: Spread, ops: tuple[TileOp, ...]) -> Spread:
    """A direction without axes divides the columns of whatever an op makes: those made last come first.

    What is only loaded is whole in shared memory already.
    """
    if d.axes:
        return d
    made = (
        a.name for op in reversed(ops) if op.out is not None and op.kind != "load" for a in op.out.axes if a != ROWS
    )
    return replace(d, axes=tuple(dict.fromkeys(made)))


@dataclass
class _Writer:
    """Tiles made so far, under named axes."""

    tensors: Mapping[str, Tensor]
    tiles: dict[str, Tile] = field(default_factory=dict)
    shared: dict[str, str] = field(default_factory=dict)  # linear of a looped layer -> the axis of all its columns

    def stage(self, stage: Stage) -> list[TileOp]:
        layers = looped_layers(stage)
        self.shared |= {op.out.name: layer.axis for layer in layers for op in layer.linears if op.out is not None}
        features = {n: self.tiles[n].features for n in stage.taken()} | {
            n: t.features for n, t in stage.defined().items()
        }
        rows = not any(is_plain(op) for op in stage.ops)
        made: list[TileOp] = []
        for op in expand(stage.ops, features) if rows else stage.ops:
            written = [op] if is_plain(op) else self._written(op)
            self.tiles |= {w.out.name: w.out for w in written if w.out is not None}
            made += written
        return made

    def _written(self, op: TileOp) -> list[TileOp]:
        ways = {
            "load": self._load, "store": self._store, "linear": self._linear, "cat": self._cat, "slice": self._slice,
            "reduce": self._reduce, "rows": self._slice,
        }  # fmt: skip
        return ways.get(op.kind, ways.get(OPS[op.kind].family, self._elementwise))(op)

    def _made(self, op: TileOp, column: Axis | None, **changes: object) -> TileOp:
        axes = (ROWS,) if column is None else (ROWS, column)
        return replace(op, out=replace(op.made, axes=axes), attrs=(), **changes)  # pyright: ignore[reportArgumentType]

    def _column(self, tile: str) -> Axis | None:
        """The axis of a tile's columns; none where it has one column."""
        return next((a for a in self.tiles[tile].axes if a != ROWS), None)

    def _new(self, op: TileOp) -> Axis | None:
        name = self.shared.get(op.made.name, column_axis(op.made.name))
        return Axis(name, op.made.features) if op.made.features != 1 else None

    def _load(self, op: TileOp) -> list[TileOp]:
        column, tap = self._new(op), Tap.of(op)
        at = At((ROWS.name,), index=op.index), _along(column)
        if tap is not None and column is not None:
            at = tap.at(column.name)
        return [self._made(op, column, tensors=(View(op.params[0], at),))]

    def _store(self, op: TileOp) -> list[TileOp]:
        column = self._column(op.ins[0])
        if op.receivers:
            return self._summed(op, column)
        at = _along(column, first_column(op))
        return [replace(op, tiles=(self._own(op.ins[0]),), tensors=(View(op.params[0], (ROW, at)),), attrs=())]

    def _summed(self, op: TileOp, column: Axis | None) -> list[TileOp]:
        """The rows of each node combined, of none 0; then stored."""
        out = self.tensors[op.params[0]]
        nodes = out.axes[0]
        total = Tile(f"{out.name}.total", (nodes, *((column,) if column else ())), "f32")
        empty = () if op.combine == "sum" else (("empty", 0.0),)
        made = TileOp("product", total, (self._own(op.ins[0]),), (), empty, op.source, op.combine)
        to = View(out.name, (At((nodes.name,)), _along(column)))
        own = View(total.name, to.at if column else (At((nodes.name,)),))
        return [made, replace(op, tiles=(own,), tensors=(to,), attrs=(), combine="sum")]

    def _at(self, tile: str, column: Axis | None) -> tuple[At, ...]:
        """Coordinates of a tile under ``column``; without, its first."""
        return (ROW,) if self._column(tile) is None else (ROW, _along(column))

    def _own(self, tile: str) -> View:
        return along(tile, [a.name for a in self.tiles[tile].axes])

    def _linear(self, op: TileOp) -> list[TileOp]:
        """A product, and the bias added to its sum."""
        inner, column = self._column(op.ins[0]), self._new(op)
        out = _along(column, first_column(op))
        weight = View(op.params[0], (out, _along(inner)))
        product = self._made(op, column, kind="product", tiles=(self._own(op.ins[0]),), tensors=(weight,))
        if len(op.params) == 1:
            return [product]
        total = replace(product, out=replace(product.made, name=f"{op.made.name}.product", dtype="f32"))
        self.tiles[total.made.name] = total.made
        bias = View(op.params[1], (out,))
        return [total, self._made(op, column, kind="add", tiles=(self._own(total.made.name),), tensors=(bias,))]

    def _cat(self, op: TileOp) -> list[TileOp]:
        """Each part, shifted to its place: what lies outside of a part is zero, and the sum of all is the whole."""
        column = self._new(op)
        if column is None:  # of one column: nothing is beside it
            return [self._made(op, None, kind="copy", tiles=(View(op.ins[0], self._at(op.ins[0], None)),))]
        made: list[TileOp] = []
        parts: list[View] = []
        start = 0
        for k, name in enumerate(op.ins):
            part = self.tiles[name]
            if self._column(name) is None:  # one column needs an axis, or it would be everywhere
                wide = Tile(f"{op.out.name if op.out else ''}.{k}", (ROWS, Axis(f"{name}.c", 1)), part.dtype)
                made.append(TileOp("copy", wide, (self._own(name),), source=op.source))
                self.tiles[wide.name] = wide
                name = wide.name
            parts.append(View(name, (ROW, At((column.name,), -start))))
            start += part.features
        return [*made, self._made(op, column, tiles=tuple(parts))]

    def _slice(self, op: TileOp) -> list[TileOp]:
        """Of maxima over rows all columns: which rows of a tile meet, no coordinate says, and where it is made does not
        depend on it."""
        column = self._new(op)
        at = (ROW, _along(column, int(op.attr("start", 0) or 0)))
        view = View(op.ins[0], at if self._column(op.ins[0]) else at[:1])
        return [self._made(op, column, kind="copy", tiles=(view,))]

    def _reduce(self, op: TileOp) -> list[TileOp]:
        return [self._made(op, None, tiles=(self._own(op.ins[0]),), combine="max" if op.kind == "max" else "sum")]

    def _elementwise(self, op: TileOp) -> list[TileOp]:
        """Operands of the result's width under its columns; one column, and vectors of one element, under none."""
        width = op.made.features
        column = next((c for n in op.ins if (c := self._column(n)) and c.size == width), None) or self._new(op)
        inner = _along(column)
        tiles = tuple(View(name, self._at(name, column)) for name in op.ins)
        given = [self.tensors[name] for name in op.params]
        tensors = tuple(View(t.name, tuple(inner if n == width else At() for n in t.shape)) for t in given)
        return [replace(self._made(op, column, tiles=tiles, tensors=tensors), attrs=op.attrs)]


def _along(column: Axis | None, first: int = 0) -> At:
    """The coordinate along ``column`` from ``first`` on; without a column ``first`` alone."""
    return At((column.name,) if column else (), first)
