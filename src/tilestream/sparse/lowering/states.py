"""Where lowering stands with each view: the stream that holds its place in the loops so far."""

from __future__ import annotations

from dataclasses import dataclass

from tilestream.sparse.fusion import Leaf, Op
from tilestream.sparse.stream.graph import Port


@dataclass(frozen=True)
class Loop:
    """One loop around what is being lowered. ``signal`` is what repeats follow: ``crd``, or its forked copy."""

    index: str
    crd: Port
    signal: Port
    nonempty: bool


Loops = tuple[Loop, ...]


@dataclass(frozen=True, eq=False)
class LeafState:
    """A tensor in memory. ``port``: references; it lies under the first ``at`` loops. ``left``: levels to come.

    ``missing``: some references are N (a union put them there).
    """

    leaf: Leaf
    port: Port
    at: int
    left: tuple[str, ...]
    missing: bool = False


@dataclass(frozen=True, eq=False)
class StreamState:
    """A computed result. ``levels``: coordinate streams to come; ``port``: its values, under all of those.

    ``missing``: some values are N (a union put them there).
    """

    op: Op
    levels: tuple[StreamLevel, ...]
    port: Port
    at: int
    missing: bool = False

    @property
    def left(self) -> tuple[str, ...]:
        return tuple(x.index for x in self.levels)


@dataclass(frozen=True)
class StreamLevel:
    index: str
    crd: Port
    full: bool
    nonempty: bool
    lanes: tuple[str, ...] = ()
    """Parallel indices whose lanes the stream is still in."""


@dataclass(frozen=True, eq=False)
class OpState:
    """A statement that iterates along with its consumer. ``left``: indices of its result to come."""

    op: Op
    kids: tuple[State, ...]
    left: tuple[str, ...]


State = LeafState | StreamState | OpState


@dataclass
class Level:
    """One operand's coordinates at one loop.

    ``slots``: streams that go with them (references, values). ``full``: every coordinate is there in every fiber.
    ``nonempty``: no fiber is empty. ``located``: a dense level that needs no scan, as it can be located.
    ``rigid``: a result with more levels below, whose fibers therefore can be neither dropped nor added to.
    """

    crd: Port
    slots: tuple[Port, ...]
    full: bool
    nonempty: bool
    located: LeafState | None = None
    rigid: str = ""
