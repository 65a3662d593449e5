"""Ops of rows on the tensors of a call, at some of its rows: a tile of them, or all."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tilestream.ir.columns import first_column, is_part
from tilestream.ir.pipeline import Pipeline, Role, TileOp
from tilestream.ir.taps import Tap
from tilestream.reference.einsum import COMBINE
from tilestream.reference.ops import Arithmetic, evaluate, pixels

HOW = {"sum": "sum", "max": "amax", "min": "amin"}


class NodeSums:
    """The result of one store with receivers.

    Args:
        combine: ``sum``, ``max`` or ``min``.
        starts: [nodes + 1], where the rows of each node start.
        dtype: in which rows are combined.
    """

    def __init__(self, combine: str, starts: Tensor, features: int, dtype: torch.dtype) -> None:
        self._how, self._empty = HOW[combine], starts.diff() == 0
        shape = len(starts) - 1, features
        self._total = torch.full(shape, COMBINE[combine][0], dtype=dtype, device=starts.device)

    def add(self, receivers: Tensor, rows: Tensor) -> None:
        """``rows`` [some, features] are those of nodes ``receivers`` [some]."""
        places = receivers.long()[:, None].expand_as(rows)
        self._total.scatter_reduce_(0, places, rows.to(self._total.dtype), self._how)

    def result(self) -> Tensor:
        """[nodes, features]"""
        return self._total.masked_fill(self._empty[:, None], 0.0)


class Rows:
    """What a pipeline in ops of rows was given, and what its stores have written so far.

    Args:
        tensors: every input and parameter, all on one device.
        rows: how many there are.
    """

    def __init__(self, p: Pipeline, tensors: Mapping[str, Tensor], rows: int, arithmetic: Arithmetic) -> None:
        self._given, self._rows, self._arithmetic = tensors, rows, arithmetic
        self._tiles, self._dtypes = p.tiles(), {t.name: t.dtype for t in p.tensors}
        self._widened: dict[str, Tensor] = {}
        stores = (op for stage in p.stages for op in stage.ops if op.receivers)
        self._sums = {op.params[0]: self._sum(op) for op in stores}
        device = next(iter(tensors.values())).device
        self._stored = {
            t.name: self._as_stored(
                torch.empty([a.size or rows for a in t.axes], dtype=arithmetic.dtype, device=device), t.name
            )
            for t in p.by_role(Role.OUTPUT)
            if t.name not in self._sums
        }

    def results(self) -> dict[str, Tensor]:
        """Every output, as memory holds it."""
        return self._stored | {name: self._as_stored(s.result(), name) for name, s in self._sums.items()}

    def load(self, op: TileOp, rows: slice) -> Tensor:
        """[rows, features], as ops compute with them."""
        source, tap = self._given[op.params[0]], Tap.of(op)
        if tap is not None:
            value = pixels(source, tap, torch.arange(*rows.indices(self._rows), device=source.device))
        else:
            value = source[self._given[op.index][rows].long() if op.index else rows]
        return self._arithmetic.widen(value)

    def store(self, op: TileOp, value: Tensor, rows: slice) -> None:
        """``value`` [rows, features] is what ``op`` stores here: all columns, a part of them, or sums."""
        name = op.params[0]
        if op.receivers:
            self._sums[name].add(self._given[op.receivers][rows], value)
            return
        to = self._stored[name][rows]
        if is_part(op):
            to = to[:, first_column(op) : first_column(op) + value.shape[1]]
        to[:] = self._as_stored(value, name)

    def evaluate(self, op: TileOp, values: Mapping[str, Tensor]) -> Tensor:
        """The result of any op but a load or store. ``values``: of all tiles that it reads."""
        params = [self._param(name) for name in op.params]
        return evaluate(op, [values[n] for n in op.ins], [self._tiles[n] for n in op.ins], params, self._arithmetic)

    def _param(self, name: str) -> Tensor:
        """A whole operand, widened once."""
        if name not in self._widened:
            self._widened[name] = self._arithmetic.widen(self._given[name])
        return self._widened[name]

    def _sum(self, op: TileOp) -> NodeSums:
        starts = self._given[op.params[2]].long()
        return NodeSums(op.combine, starts, self._tiles[op.ins[0]].features, self._arithmetic.dtype)

    def _as_stored(self, value: Tensor, name: str) -> Tensor:
        return self._arithmetic.stored(value, self._dtypes[name])
