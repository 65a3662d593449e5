"""Bounded rings of tiles: what their ends make and take at once, and how deep they must be for both to go on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import ceil, gcd, prod

from tilestream.ir.pipeline import Pipeline, Queue, Stage


def keyed(p: Pipeline, q: Queue) -> dict[str, int]:
    """The axes by whose blocks the tiles of a ring are told apart, outermost loop first: those that its producer loops
    over, and the blocks. What the producer sums over all of its loops is one tile."""
    own = {a.name for a in p.tiles()[q.tile].axes}
    return {loop.axis: loop.tile for loop in p.stage(q.producer).loops if loop.axis in own}


def blocks(axes: Mapping[str, int], size: Mapping[str, int]) -> list[int]:
    """How many blocks there are along each axis of ``keyed``."""
    return [ceil(size[axis] / block) for axis, block in axes.items()]


def tiles_of(p: Pipeline, q: Queue, size: Mapping[str, int]) -> int:
    """How many tiles pass through a ring in all."""
    return prod(blocks(keyed(p, q), size))


def at_once(stage: Stage, axes: Mapping[str, int], size: Mapping[str, int]) -> list[int] | None:
    """Blocks along each of ``axes`` that the workers of a stage make or take in a step: all of an axis that they do not
    loop over; None where how many that is is not known."""
    looped = stage.blocks
    if any(axis not in looped and axis not in size for axis in axes):
        return None
    return [stage.parts(axis) if axis in looped else ceil(size[axis] / block) for axis, block in axes.items()]


def in_flight(parts: Sequence[Sequence[int]], inner: Sequence[int]) -> list[int]:
    """Of stages that go through the same blocks in nested loops: how many tiles each makes or takes before it goes on.

    Along outer axes where all take equally many at once they go along together. Of the first where they differ, one may
    need several steps of another, each with all that lies inside.

    Args:
        parts: of each stage, ``at_once``.
        inner: ``blocks`` of all axes; not asked for of a single axis.
    """
    differ = next((i for i, each in enumerate(zip(*parts, strict=True)) if len(set(each)) > 1), len(parts[0]))
    return [prod(p[: differ + 1]) * prod(inner[differ + 1 :]) for p in parts]


def least_depth(made: int, taken: int) -> int:
    """Of a ring whose ends make and take so many tiles before they go on: with it both can always go on.

    What is in the ring is a multiple of the gcd, so one of the two finds room for its step, or has enough for it.
    """
    return made + taken - gcd(made, taken)
