"""Ragged axes at a call: where the positions lie that belong to each position of the axis around them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor as Array

from tilestream.errors import InputError
from tilestream.ir.axes import Axis, around, outermost_first
from tilestream.ir.pipeline import Pipeline, Role, TileOp

Positions = dict[str, Array]
"""Of each axis, those that are meant."""


@dataclass(frozen=True)
class Segments:
    """Of one ragged axis: position ``o`` of ``of`` has positions ``starts[o]`` to ``starts[o + 1]``."""

    of: str
    starts: Array
    size: int

    @cached_property
    def lengths(self) -> Array:
        return self.starts.diff()

    @cached_property
    def owner(self) -> Array:
        """Of each position, the one around it; -1 of those that lie within none."""
        found = torch.full([self.size], -1)
        found[int(self.starts[0]) : int(self.starts[-1])] = torch.repeat_interleave(self.lengths)
        return found

    @cached_property
    def place(self) -> Array:
        """Of each position, how many of the same owner lie before it."""
        return torch.arange(self.size) - self.starts[self.owner.clamp(min=0)]

    @property
    def longest(self) -> int:
        """At least one, so that a loop over nothing still says that a sum is of nothing."""
        return max([1, *self.lengths.tolist()])


def segments_of(p: Pipeline, tensors: Mapping[str, Array], size: dict[str, int]) -> dict[str, Segments]:
    """Of every ragged axis of ``p``. Sizes that follow from the bounds are added to ``size``.

    Raises:
        InputError: bounds are not given, have another length than their axis, fall, or leave what they are bounds of;
            says where.
    """
    found: dict[str, Segments] = {}
    for axis in outermost_first(p.ragged):
        if axis.bounds not in tensors:
            raise InputError(f"bounds {axis.bounds!r} of axis {axis.name!r} are not given", "give one more than outer")
        starts = tensors[axis.bounds].long()
        nodes = size.setdefault(axis.of, max(0, len(starts) - 1))
        if len(starts) != nodes + 1:
            raise InputError(
                f"bounds {axis.bounds!r} have {len(starts)} entries, and {axis.of!r} has {nodes} positions",
                f"give {nodes + 1}",
            )
        _check(axis, starts, size.setdefault(axis.name, int(starts[-1])), p)
        found[axis.name] = Segments(axis.of, starts, size[axis.name])
    return found


def _check(axis: Axis, starts: Array, size: int, p: Pipeline) -> None:
    falls = (starts.diff() < 0).nonzero()
    if len(falls):
        at = int(falls[0])
        raise InputError(
            f"bounds {axis.bounds!r} fall from {int(starts[at])} at position {at} to {int(starts[at + 1])} at {at + 1}",
            "give bounds that never fall",
        )
    first, last = int(starts[0]), int(starts[-1])
    if first < 0 or last > size:
        raise InputError(
            f"bounds {axis.bounds!r} go from {first} to {last}, and {axis.name!r} has {size} positions",
            f"give bounds from 0 to {size}",
        )
    whole = [t.name for t in p.by_role(Role.OUTPUT) if any(a.name == axis.name for a in t.axes)]
    if whole and (first, last) != (0, size):
        raise InputError(
            f"output {whole[0]!r} has {size} positions of {axis.name!r}, and bounds {axis.bounds!r} give {first} to"
            f" {last} of them to some {axis.of!r}",
            f"give bounds from 0 to {size}",
        )


def check_orders(p: Pipeline, tensors: Mapping[str, Array]) -> None:
    """What is stored through an index along a ragged axis is stored once.

    Raises:
        InputError: two positions have one place; says which.
    """
    stores = (op.views[-1] for s in p.stages for op in s.ops if op.kind == "store")
    for at in (at for view in stores for at in view.at or () if at.index and p.ragged.keys() & set(at.axes)):
        order = tensors[at.index].tolist()
        first: dict[int, int] = {}
        for position, place in enumerate(order):
            if first.setdefault(place, position) != position:
                raise InputError(
                    f"order {at.index!r} has {place} at {first[place]} and at {position}: the last would win",
                    "give each position a place of its own",
                )


def check_indices(p: Pipeline, tensors: Mapping[str, Array]) -> None:
    """What names rows of tensors names some that there are.

    Raises:
        InputError: one does not; says which and where.
    """
    reads = (v for s in p.stages for op in s.ops for v in op.views if v.of in tensors and op.out is not None)
    for view in reads:
        for size, at in zip(tensors[view.of].shape, view.at or (), strict=True):
            if not at.index or at.offset or at.strides:
                continue
            bad = ((tensors[at.index] < 0) | (tensors[at.index] >= size)).nonzero()
            if len(bad):
                found = f"{int(tensors[at.index][int(bad[0])])} at {int(bad[0])}"
                raise InputError(
                    f"index {at.index!r} of {view.of!r} is {found}, of {size} rows", "give rows that exist"
                )


def pieces(op: TileOp, at: Positions, segments: Mapping[str, Segments]) -> Iterator[Positions]:
    """``at`` in parts in which no two positions of ragged axes belong to different ones around them.

    One part where that does not matter: where ``op`` has one ragged axis and not the one around it.

    Args:
        at: positions of every axis of ``op`` and of those around its ragged ones.
    """
    own = [a for a in op.mentions if a in segments]
    if len(own) < 2 and not any(segments[a].of in op.mentions for a in own):
        yield at
        return
    outer = {a: each.of for a, each in segments.items()}
    outers = {outer[a] for a in at if a in outer}
    yield from _fixed(at, sorted(outers, key=lambda a: len(around((a,), outer))), segments)


def _fixed(at: Positions, outers: Sequence[str], segments: Mapping[str, Segments]) -> Iterator[Positions]:
    if not outers:
        yield at
        return
    first, *others = outers
    inside = [a for a in at if a in segments and segments[a].of == first]
    for position in at[first]:
        part = {a: at[a][segments[a].owner[at[a]] == position] for a in inside}
        yield from _fixed({**at, first: position[None], **part}, others, segments)


def none_at_all(op: TileOp, at: Positions, segments: Mapping[str, Segments]) -> bool:
    """Whether a ragged axis that ``op`` sums over has no position here, of any worker and round."""
    summed = [segments[a] for a in op.mentions.difference(op.result_axes) if a in segments]
    return any(int(each.lengths[at[each.of]].sum()) == 0 for each in summed)
