"""Schedules, clusters and tiles: FlashFuser's parameters of a chain (sections IV and V), and what a cluster may be."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations, permutations
from math import prod

from tilestream.errors import OptionError
from tilestream.ir.axes import Level
from tilestream.studies.flashfuser.dataflow.chain import Chain, Gate

AXES = "mnkl"


@dataclass(frozen=True)
class Schedule:
    """``spatial`` axes are dealt over the grid, the others are nested loops in the order of ``loops``."""

    spatial: str
    loops: str

    def __str__(self) -> str:
        return f"{self.spatial.upper()}|{' '.join(self.loops.upper())}" if self.loops else f"{self.spatial.upper()}|"


SCHEDULES = tuple(
    Schedule("".join(spatial), "".join(loops))
    for count in range(1, 5)
    for spatial in combinations(AXES, count)
    for loops in permutations([a for a in AXES if a not in spatial])
)
"""All 41 (Table IV): at least one axis is spatial."""


@dataclass(frozen=True)
class Cluster:
    """Blocks of a group along each axis: m x n x k in the first product, re-dealt as m x l x reduce in the second."""

    m: int = 1
    n: int = 1
    k: int = 1
    l: int = 1  # noqa: E741

    @property
    def blocks(self) -> int:
        """All blocks; ``l`` is no further factor, since the second product's blocks are the first's."""
        return self.m * self.n * self.k

    @property
    def legal(self) -> bool:
        """Whether its blocks can be re-dealt: whole shuffle groups, and whole sums."""
        return min(self.m, self.n, self.k, self.l) > 0 and self.l % self.k == 0 and (self.n * self.k) % self.l == 0

    @property
    def shuffle(self) -> int:
        """Blocks that hand each other their parts of C."""
        return self.l // self.k

    @property
    def reduce(self) -> int:
        """Shuffle groups whose parts of E are summed."""
        return self.n * self.k // self.l


@dataclass(frozen=True)
class Tiles:
    """What a block takes of each axis at once. ``k`` is the depth of a step of the first product."""

    m: int
    n: int
    k: int
    l: int  # noqa: E741


@dataclass(frozen=True)
class Dataflow:
    """One way to run a chain.

    Attributes:
        middle: where the blocks of a group exchange C: as a cluster through DSM, or over the grid through the L2.
        tail: where they sum E, when several shuffle groups have a part of it. What grid-spatial N leaves is added in
            memory.
    """

    schedule: Schedule
    cluster: Cluster
    tiles: Tiles
    middle: Level = Level.CLUSTER
    tail: Level = Level.CLUSTER

    def trips(self, chain: Chain) -> dict[str, int]:
        """How many groups there are along each axis: CTAs or clusters of the grid, or rounds of a loop."""
        return {a: -(-chain.size(a) // self.span(chain, a)) for a in AXES}

    def span(self, chain: Chain, axis: str) -> int:
        """What a group takes of ``axis`` at once."""
        over = 1 if axis == "k" and chain.gate is Gate.SPATIAL else getattr(self.cluster, axis)
        return over * getattr(self.tiles, axis)

    def groups(self, chain: Chain) -> int:
        trips = self.trips(chain)
        return prod(trips[a] for a in self.schedule.spatial)

    def blocks(self, chain: Chain) -> int:
        """CTAs of the launch."""
        return self.groups(chain) * self.cluster.blocks

    def check(self, chain: Chain) -> None:
        """Raise if blocks or tiles do not come out even.

        Raises:
            OptionError: with the arithmetic.
        """
        c, t = self.cluster, self.tiles
        if not c.legal:
            raise OptionError(
                f"cluster ({c.m}, {c.n}, {c.k}, {c.l}): l / k = {c.l}/{c.k} blocks shuffle and n k / l ="
                f" {c.n * c.k}/{c.l} groups are summed: both must be whole",
                "take l as a multiple of k that divides n k",
            )
        for axis in AXES:
            if getattr(t, axis) < 1 or chain.size(axis) % self.span(chain, axis):
                raise OptionError(
                    f"chain {chain.name!r}: {axis} {chain.size(axis)} is no multiple of {self.span(chain, axis)},"
                    f" what a group takes of it (tiles of {getattr(t, axis)})",
                    "use tiles that divide it",
                )
        if t.l % c.reduce:
            raise OptionError(
                f"each of {c.reduce} shuffle groups stores {t.l}/{c.reduce} columns of E", "make blk_l a multiple"
            )
        if chain.gate is Gate.SPATIAL and (c.k != 2 or "k" in self.schedule.spatial):
            raise OptionError(
                f"a spatial gate needs the two halves of cls_k = 2 for its branches; cls_k is {c.k},"
                f" spatial axes are {self.schedule.spatial}",
                "use cls_k = 2 and let K be a loop, or run the branches one after the other",
            )
