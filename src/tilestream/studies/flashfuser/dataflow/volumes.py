"""Bytes that a dataflow of a chain moves at each level, as formulas over arrays of candidates.

What the reference machine counts for ``lower(chain, flow)``, without running it: a test holds both against each other
over all schedules. Re-reads follow Chimera's rule: from the innermost loop outwards, once a loop over an operand's own
axes has been crossed, every further loop multiplies its traffic, its own or not. (FlashFuser's Algorithm 1 multiplies
by own loops alone: ``printed``.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tilestream.ir.axes import Level
from tilestream.studies.flashfuser.dataflow.chain import ACCUMULATOR, ELEMENT, Chain, Gate
from tilestream.studies.flashfuser.dataflow.lower import kept
from tilestream.studies.flashfuser.dataflow.schedule import AXES, Dataflow, Schedule

Counts = Any
"""A number, or an array of one a candidate."""


@dataclass(frozen=True)
class Candidates:
    """Clusters and tiles of one schedule: each field an integer or an array, broadcast against the others.

    ``shuffle`` and ``reduce`` are the cluster's; ``trips`` the number of groups along each axis.
    """

    schedule: Schedule
    cluster: dict[str, Counts]
    tiles: dict[str, Counts]
    trips: dict[str, Counts]
    middle: Level = Level.CLUSTER
    tail: Level = Level.CLUSTER

    @staticmethod
    def of(chain: Chain, flow: Dataflow) -> Candidates:
        """One candidate, in plain numbers."""
        cluster = {a: getattr(flow.cluster, a) for a in AXES}
        tiles = {a: getattr(flow.tiles, a) for a in AXES}
        return Candidates(flow.schedule, cluster, tiles, flow.trips(chain), flow.middle, flow.tail)

    @property
    def shuffle(self) -> Counts:
        return self.cluster["l"] // self.cluster["k"]

    @property
    def reduce(self) -> Counts:
        return self.cluster["n"] * self.cluster["k"] // self.cluster["l"]

    @property
    def blocks(self) -> Counts:
        """CTAs of the launch."""
        made = self.cluster["m"] * self.cluster["n"] * self.cluster["k"]
        for axis in self.schedule.spatial:
            made = made * self.trips[axis]
        return made

    def spatial(self, axis: str) -> Counts:
        """Groups along ``axis`` that run side by side: one, where a loop runs over it."""
        return self.trips[axis] if axis in self.schedule.spatial else 1

    def rounds(self, axis: str) -> Counts:
        """Rounds of the loop over ``axis``: one, where it is spatial."""
        return 1 if axis in self.schedule.spatial else self.trips[axis]

    def again(self, own: str, over: str) -> Counts:
        """Times that an operand with axes ``own`` is read because groups or rounds along ``over`` need it too."""
        return 1 if kept(self.schedule.loops, own, over) else self.trips[over]


@dataclass(frozen=True)
class Volumes:
    """Bytes of one run. ``operands``: what each of A, B, D and E moves in the L2 (once for a whole cluster)."""

    operands: dict[str, Counts]
    exchange: Counts
    """All-exchange of C between blocks that split K, or that make a branch of a gate each."""
    shuffle: Counts
    """Parts of C that blocks of a shuffle group hand each other."""
    reduce: Counts
    """Partial E that shuffle groups sum."""
    far: Counts
    """The part of ``exchange`` that leaves the cluster, because K is spatial: through the L2 in any case."""
    middle: Level
    tail: Level

    @property
    def dsm(self) -> Counts:
        near = (self.exchange - self.far + self.shuffle) if self.middle is Level.CLUSTER else 0
        return near + (self.reduce if self.tail is Level.CLUSTER else 0)

    @property
    def l2(self) -> Counts:
        through = self.far if self.middle is Level.CLUSTER else self.exchange + self.shuffle
        return sum(self.operands.values()) + through + (self.reduce if self.tail is Level.GRID else 0)


def volumes(chain: Chain, at: Candidates) -> Volumes:
    """What ``chain`` moves under each of the candidates, each byte counted where it is received or stored."""
    c, branches = at.cluster, chain.branches
    halves = chain.gate is Gate.SPATIAL
    # CTAs that want A and do not share one load of it: everyone that makes other columns, outside of a cluster.
    apart = (at.shuffle if at.middle is Level.GRID else 1) * (at.reduce if at.tail is Level.GRID else 1)
    apart = apart * (c["k"] if halves and at.middle is Level.GRID else 1)
    own_b = "branch,n,k" if halves else "n,k"
    twice = 2 if chain.gate is Gate.SEQUENTIAL else 1
    elsewhere = at.spatial("l")  # the first product is made again by each group along L
    operands = {
        "A": ELEMENT * chain.m * chain.k * twice * at.again("m,k", "n") * elsewhere * apart,
        "B": ELEMENT * branches * chain.n * chain.k * at.again(own_b, "m") * elsewhere,
        "D": ELEMENT * chain.l * chain.n * at.again("l,n", "m") * at.spatial("k"),
        "E": ELEMENT * chain.m * chain.l * at.spatial("n"),
    }
    middle, partial = chain.m * chain.n * elsewhere, ACCUMULATOR * twice
    apart_k = at.spatial("k")
    peers = c["k"] * apart_k
    return Volumes(
        operands,
        peers * (peers - 1) * middle * partial,
        (at.shuffle - 1) * c["k"] * apart_k * middle * ELEMENT * at.rounds("l"),
        (at.reduce - 1) * at.spatial("n") * chain.m * chain.l * ACCUMULATOR,
        peers * c["k"] * (apart_k - 1) * middle * partial,
        at.middle,
        at.tail,
    )


def dram(chain: Chain, at: Candidates, l2_bytes: float) -> Counts:
    """Bytes of DRAM: each operand once; again for each further round of a loop if the L2 has lost it by then.

    It has, where the operand alone is larger than the L2. Groups that run side by side read at about the same time and
    share one read. C and E, whole, are on chip or in the L2 (``places``).
    """
    stored = {
        "A": ELEMENT * chain.source,
        "B": ELEMENT * chain.branches * chain.n * chain.k,
        "D": ELEMENT * chain.n * chain.l,
        "E": ELEMENT * chain.m * chain.l,
    }
    loop = {"A": ("m,k", "n"), "B": ("n,k", "m"), "D": ("l,n", "m")}
    total: Counts = stored["E"]
    for name, (own, over) in loop.items():
        lost = stored[name] > l2_bytes and over not in at.schedule.spatial
        total = total + stored[name] * (at.again(own, over) if lost else 1)
    return total


def printed(chain: Chain, at: Candidates) -> dict[str, Counts]:
    """Algorithm 1 as it is printed, of one block: bytes of A, B, D and E in global memory.

    A block's footprint times the rounds of those loops that index the tensor. A spatial axis has its tile's size, so
    that it multiplies nothing, and a loop that does not index a tensor never makes it be read again.
    """
    footprint: dict[str, Callable[[], Counts]] = {
        "A": lambda: at.tiles["m"] * at.tiles["k"],
        "B": lambda: at.tiles["k"] * at.tiles["n"] * chain.branches,
        "D": lambda: at.tiles["n"] * at.tiles["l"],
        "E": lambda: at.tiles["m"] * at.tiles["l"],
    }
    own = {"A": "mk", "B": "kn", "D": "nl", "E": "ml"}
    made = {}
    for name, size in footprint.items():
        moved = ELEMENT * size()
        for axis in at.schedule.loops:
            moved = moved * (at.trips[axis] if axis in own[name] else 1)
        made[name] = moved
    return made
