"""The workers of a stage: which part of an axis each has, at which step, for which op."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product

import torch
from torch import Tensor

from tilestream.ir.axes import At, View
from tilestream.ir.derive import divided
from tilestream.ir.pipeline import Stage, TileOp
from tilestream.reference.segments import Segments

Coordinates = tuple[int, ...]
"""One worker: a digit a direction of the mesh."""

Steps = Mapping[str, int]
"""Where the loops stand."""


@dataclass(frozen=True)
class Workers:
    """The mesh of ``stage``, over axes of these sizes.

    A looped axis is dealt out in blocks of the loop's tile, round after round; another is cut into one block a worker.
    A ragged one is dealt out anew for each position of the axis around it.
    """

    stage: Stage
    size: Mapping[str, int]
    segments: Mapping[str, Segments]

    @cached_property
    def extent(self) -> dict[str, int]:
        """Positions that a loop goes over: of a ragged axis the longest part."""
        return {**self.size, **{axis: each.longest for axis, each in self.segments.items()}}

    def rounds(self, axis: str) -> int:
        return self.stage.rounds(axis, self.extent)

    def all(self) -> list[Coordinates]:
        return list(product(*(range(d.size) for d in self.stage.mesh)))

    def step(self, axis: str, now: Steps) -> Tensor:
        """Positions of this round, of all workers together."""
        many = self.stage.block(axis, self.extent) * self.stage.parts(axis)
        ragged = self.segments.get(axis)
        if ragged is not None:
            mine = torch.isin(ragged.owner, self.step(ragged.of, now))
            return (mine & (ragged.place // many == now[axis]) if axis in now else mine).nonzero().flatten()
        if axis not in now:
            return torch.arange(self.size[axis])
        return torch.arange(now[axis] * many, min((now[axis] + 1) * many, self.size[axis]))

    def share(self, positions: Tensor, axis: str, op: TileOp, me: Coordinates) -> Tensor:
        """Those of ``positions`` that are this worker's in ``op``; of a ragged axis, where those around them are."""
        ragged = self.segments.get(axis)
        if ragged is not None:
            owner = ragged.owner[positions]
            positions = positions[torch.isin(owner, self.share(owner.unique(), ragged.of, op, me))]
        dividing = self.dividing(axis, op)
        if not dividing:
            return positions
        places = positions if ragged is None else ragged.place[positions]  # within the one around them
        digit = places // self.stage.block(axis, self.extent)
        mine = torch.ones_like(positions, dtype=torch.bool)
        for i, d in reversed(list(enumerate(self.stage.mesh))):
            if axis in d.axes:
                if i in dividing:
                    mine &= digit % d.size == me[i]
                digit = digit // d.size
        return positions[mine]

    def dividing(self, axis: str, op: TileOp) -> tuple[int, ...]:
        """Directions whose workers divide ``op`` along ``axis``."""
        return tuple(i for i, d in enumerate(self.stage.mesh) if axis in d.axes and divided(op, d, self.stage) == axis)


def coordinate(at: At, positions: Mapping[str, Tensor], order: tuple[str, ...], memory: Mapping[str, Tensor]) -> Tensor:
    """Positions along one dimension, broadcastable over ``order``: a length or 1 for each of its axes."""
    where = torch.tensor(at.offset).reshape([1] * len(order))
    for axis, stride in zip(at.axes, at.strides or [1] * len(at.axes), strict=True):
        shape = [len(positions[a]) if a == axis else 1 for a in order]
        part = positions[axis] // at.over
        where = where + stride * (part % at.within if at.within else part).reshape(shape)
    return memory[at.index][where.clamp(0, len(memory[at.index]) - 1)].long() if at.index else where


def read(
    source: Tensor, view: View, positions: Mapping[str, Tensor], memory: Mapping[str, Tensor], outside: int = 0
) -> Tensor:
    """``source`` under ``view``, one dimension an axis that the view mentions; ``outside`` of it, that."""
    at, order = view.at or (), view.axes
    if not at:
        return source
    block = _block(source, at, positions)
    if block is not None:
        return block
    index = [coordinate(c, positions, order, memory) for c in at]
    beyond = torch.zeros([1] * len(order), dtype=torch.bool)
    for k, size in enumerate(source.shape):
        beyond = beyond | (index[k] < 0) | (index[k] >= size)
        index[k] = index[k].clamp(0, size - 1)
    value = source[tuple(torch.broadcast_tensors(*index))]
    shape = torch.broadcast_shapes(value.shape, beyond.shape)
    return torch.where(beyond.expand(shape), torch.tensor(outside, dtype=value.dtype), value.expand(shape))


def _block(source: Tensor, at: tuple[At, ...], positions: Mapping[str, Tensor]) -> Tensor | None:
    """What a view of plain coordinates reads, most of all views: a block, or None where it is none of ``source``."""
    if len({c.axes for c in at}) < len(at) or any(len(c.axes) != 1 or c.strides or c.index for c in at):
        return None
    cuts = []
    for c, size in zip(at, source.shape, strict=True):
        where = positions[c.axes[0]]
        if not len(where):
            return None
        first, last = int(where[0]) + c.offset, int(where[-1]) + c.offset
        if first < 0 or last >= size or last - first + 1 != len(where):
            return None
        cuts.append(slice(first, last + 1))
    return source[tuple(cuts)]
