"""A pipeline as plain torch operators on whole tensors: what runs where neither kernels nor tiles can."""

from __future__ import annotations

from collections.abc import Mapping
from functools import reduce
from math import prod

import torch
from torch import Tensor as Array

from tilestream.ir.aliases import renamed
from tilestream.ir.axes import ROWS, View
from tilestream.ir.derive import sums
from tilestream.ir.pipeline import Pipeline, TileOp
from tilestream.ir.taps import rows_given
from tilestream.ir.ways import producers_first
from tilestream.reference.einsum import COMBINE, align, evaluate, softmax
from tilestream.reference.memory import Memory
from tilestream.reference.ops import arithmetic_of
from tilestream.reference.rows import Rows
from tilestream.reference.workers import read

REDUCE = {"sum": "sum", "max": "max", "min": "min", "mul": "prod"}


def run_ragged(pipeline: Pipeline, tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Every output of a pipeline with one ragged axis, on the device of its tensors, rounded as by ``reference.run``.

    Args:
        tensors: as for ``reference.run``; or those that are not indices all in float64, and nothing is rounded.

    Raises:
        InputError: bounds that are none.
    """
    with torch.device(next(iter(tensors.values())).device):
        return _Whole(pipeline, tensors).run()


class _Whole(Memory):
    """Values of all ops, in order. An op of edges reads what nodes have at the node of each edge."""

    def __init__(self, p: Pipeline, tensors: Mapping[str, Array]) -> None:
        super().__init__(p, tensors, arithmetic_of(tensors.values()))
        ((self.edges, self.one),) = self.segments.items()
        self.tiles = p.tiles()

    def run(self) -> dict[str, Array]:
        for op in (op for stage in self.p.stages for op in stage.ops):
            if op.out is None:
                self._store(op)
            else:
                value = self._made(op)
                self.memory[op.out.name] = self.arithmetic.rounded(value, op.out.dtype) if op.kind == "cast" else value
        return self.outputs()

    def _made(self, op: TileOp) -> Array:
        """At each edge if ``op`` has edges, then summed to nodes if its result has none."""
        over_edges = self.edges in sums(op)
        flat = self._at_edges(op)
        operands = [self._operand(op, view) for view in op.views]
        lengths = {a: self.size[a] for a in flat.mentions}
        if op.combine == "softmax" and over_edges:
            return self._softmax(flat, operands, lengths)
        if op.combine == "softmax":
            return softmax(flat, operands, lengths)[0]
        value = evaluate(flat, operands, lengths, self.arithmetic.dtype)
        if not over_edges:
            return value
        axis, empty = self._axis(flat), op.attr("empty")
        found = self._summed(value, axis, op.combine)
        return found if empty is None else torch.where(self._none(found, axis), float(empty), found)

    def _at_edges(self, op: TileOp) -> TileOp:
        """``op`` with edges in the place of their nodes, if it has any."""
        nodes = self.one.of
        if self.edges not in op.mentions or nodes not in op.mentions:
            return op
        return renamed(op, lambda axis: self.edges if axis == nodes else axis)

    def _operand(self, op: TileOp, view: View) -> Array:
        at = {a: torch.arange(self.size[a]) for a in view.axes}
        value = read(self.memory[view.of], view, at, self.memory)
        if op.kind == "product" and view.of in self.tiles:
            value = self.arithmetic.rounded(value, self.tiles[view.of].dtype)
        if self.edges in op.mentions and self.one.of in view.axes:
            return self._of_edges(value, view.axes.index(self.one.of))
        return value

    def _of_edges(self, value: Array, axis: int) -> Array:
        """What nodes have, at each of their edges."""
        return value.index_select(axis, self.one.owner.clamp(min=0))

    def _axis(self, flat: TileOp) -> int:
        return flat.result_axes.index(self.edges)

    def _summed(self, value: Array, axis: int, how: str) -> Array:
        moved = value.movedim(axis, 0).contiguous()
        nothing = COMBINE[how][0]
        if not moved.numel():
            return torch.full([self.size[self.one.of], *moved.shape[1:]], nothing, dtype=value.dtype).movedim(0, axis)
        starts = self.one.starts
        return torch.segment_reduce(moved, REDUCE[how], offsets=starts, axis=0, initial=nothing).movedim(0, axis)

    def _none(self, like: Array, axis: int) -> Array:
        """Where nodes have no edges."""
        return (self.one.lengths == 0).reshape([-1 if i == axis else 1 for i in range(like.dim())])

    def _softmax(self, flat: TileOp, operands: list[Array], lengths: dict[str, int]) -> Array:
        """By the maximum of each node's scores, those of other axes that are summed with them included."""
        kept, summed = flat.result_axes, sorted(sums(flat))
        order, axis = (*kept, *summed), self._axis(flat)
        score, *values = (align(x, v.axes, order) for x, v in zip(operands, flat.views, strict=True))
        size = [lengths[a] for a in order]
        flattened = [*size[: len(kept)], prod(size[len(kept) :])]
        score, value = (x.expand(size).reshape(flattened) for x in (score, reduce(torch.mul, values)))
        most = self._of_edges(self._summed(score.amax(-1), axis, "max"), axis)
        weight = (score - most[..., None]).exp()
        total, whole = (self._summed(x.sum(-1), axis, "sum") for x in (weight * value, weight))
        return torch.where(self._none(whole, axis), 0.0, total / whole)

    def _store(self, op: TileOp) -> None:
        at = {a: torch.arange(self.size[a]) for a in op.mentions}
        self.store(op, read(self.memory[op.ins[0]], op.views[0], at, self.memory), at)


def run_whole(pipeline: Pipeline, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Every output of ``pipeline`` on the device of its tensors: ``[rows, features]``, and sums over all rows.

    The same rounding as ``reference.run``, without stages, tiles or queues: ops in the order of their operands. Of
    general axes those of weight gradients and backward chains (``plan.gradients``, ``plan.backward_chains``), those of
    layers on shared tiles and over the grid, and pipelines of one ragged axis (``run_ragged``).

    Args:
        tensors: every input, ``[rows, features]``, and every parameter, of its declared shape and dtype; or all of them
            in float64, and nothing is rounded.
    """
    if len(pipeline.ragged) == 1:
        return run_ragged(pipeline, tensors)
    arithmetic = arithmetic_of(tensors.values())
    rows = rows_given(pipeline, lambda name: tensors[name].shape[0])
    memory, tiles, every = Rows(pipeline, tensors, rows, arithmetic), pipeline.tiles(), slice(None)
    values: dict[str, torch.Tensor] = {}
    for op in (op for stage in producers_first(pipeline) for op in stage.ops):
        if op.out is None:
            memory.store(op, values[op.ins[0]], every)
        elif op.kind == "load":
            values[op.out.name] = memory.load(op, every)
        elif op.kind == "product":
            given = [arithmetic.stored(values[name], tiles[op.ins[0]].dtype) for name in op.ins]
            given += [tensors[name] for name in op.params]
            lengths = {a: n for x, v in zip(given, op.views, strict=True) for a, n in zip(v.axes, x.shape, strict=True)}
            values[op.out.name] = arithmetic.widen(evaluate(op, given, lengths, arithmetic.dtype))
        elif op.kind == "sum" and ROWS not in op.out.axes:
            values[op.out.name] = values[op.ins[0]].sum(0, dtype=arithmetic.dtype)
        else:
            values[op.out.name] = memory.evaluate(op, values)
    return memory.results()
