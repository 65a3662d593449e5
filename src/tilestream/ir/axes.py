"""Axes: what an op ranges over, how it reads and writes by them, which workers divide them.

A placement over a mesh, a collective, what streams, accumulates or is held whole: none of it is declared. All follows
from these few names (``ir.derive``).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


@dataclass(frozen=True)
class Axis:
    """A named iteration axis. ``size`` is ``None`` where it is read at the call.

    Attributes:
        of, bounds: of a ragged axis, the axis around it, and the tensor that says where the part of each of its
            positions lies: position ``o`` of ``of`` has positions ``bounds[o]`` to ``bounds[o + 1]``.
    """

    name: str
    size: int | None = None
    of: str = ""
    bounds: str = ""


ROWS = Axis("rows")
"""The axis that pipelines stream along: leading dimensions, flattened."""


def around(names: Iterable[str], outer: Mapping[str, str]) -> frozenset[str]:
    """``names``, and the axes that lie around the ragged ones of them.

    Args:
        outer: the axis around each ragged one.
    """
    found = frozenset(names)
    while more := {outer[a] for a in found if a in outer} - found:
        found |= more
    return found


def outer_axes(axes: Iterable[Axis]) -> dict[str, str]:
    """The axis around each ragged one."""
    return {a.name: a.of for a in axes if a.of}


def outermost_first(ragged: Mapping[str, Axis]) -> list[Axis]:
    """Ragged axes, each behind those that lie around it."""
    outer = outer_axes(ragged.values())
    return sorted(ragged.values(), key=lambda a: len(around((a.name,), outer)))


def sizes(*of: int) -> tuple[Axis, ...]:
    """Axes of these sizes that get their names from the pipeline that they come to."""
    return tuple(Axis("", n) for n in of)


COMBINES = ("sum", "max", "min", "mul", "softmax")
"""What summing may mean. Of nothing: 0, -inf, inf, 1 and 0. A maximum or minimum is NaN if any operand is."""


@dataclass(frozen=True)
class At:
    """One coordinate: ``strides`` times ``axes`` plus ``offset``, looked up in tensor ``index`` if there is one.

    ``rows``; ``c+128`` (columns of a slice); ``2*y+ky-1`` (a tap); ``senders[edges]`` (a gather); ``0`` (no axes);
    ``2*(rows/56%28)-1`` (a tap where rows are pixels). What lies outside of the tensor or tile reads as zero.

    Attributes:
        strides: one an axis; empty means all one.
        over, within: of an axis that several dimensions are flattened to, one of them: ``position / over % within``
            (0: no remainder is taken), in whole numbers, before strides. With ``strides`` alone.
    """

    axes: tuple[str, ...] = ()
    offset: int = 0
    index: str = ""
    strides: tuple[int, ...] = ()
    over: int = 1
    within: int = 0

    def part(self, axis: str) -> str:
        """What is taken of ``axis``, as text."""
        taken = axis + f"/{self.over}" * (self.over != 1) + f"%{self.within}" * (self.within != 0)
        return taken if taken == axis else f"({taken})"


@dataclass(frozen=True)
class View:
    """A tensor or a tile by name, as an op reads or writes it: a coordinate a dimension. It moves nothing by itself.

    Attributes:
        at: ``None`` means under its own axes, and for an operand of a row op by that op's own rule (``ir.plain``).
    """

    of: str
    at: tuple[At, ...] | None = None

    @cached_property
    def axes(self) -> tuple[str, ...]:
        """Axes that the coordinates mention, in order."""
        return tuple(dict.fromkeys(a for at in self.at or () for a in at.axes))


def along(name: str, axes: Sequence[str]) -> View:
    """``name`` under ``axes``, one a dimension."""
    return View(name, tuple(At((a,)) for a in axes))


class Level(StrEnum):
    """Where workers stand: CTAs of the grid, CTAs of a cluster, warpgroups of a CTA."""

    GRID = "grid"
    CLUSTER = "cluster"
    WARPGROUP = "warpgroup"

    @property
    def memory(self) -> str:
        """Where workers of the level meet."""
        return {"grid": "l2", "cluster": "dsm", "warpgroup": "shared"}[self.value]


@dataclass(frozen=True)
class Spread:
    """A direction of a mesh: ``size`` workers at ``level``, and the axes that they divide.

    They divide an op along *the first of ``axes`` that the op mentions*. So the order says what is exchanged:
    ``(hid, out)`` sums partial results of a feed-forward block, ``(out, hid)`` gathers its middle. Without axes they
    divide the columns of whatever an op makes (``Shard(1)``).
    """

    level: Level
    size: int
    axes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Loop:
    """A loop of a stage over ``axis``: each worker takes ``tile`` of it a step.

    Attributes:
        held: of columns: what the loop makes is kept until it is whole. Otherwise what follows takes it turn by turn.
    """

    axis: str
    tile: int
    held: bool = False
