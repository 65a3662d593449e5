"""FlashFuser's search space and its five pruning rules, each a predicate, and how many candidates each leaves.

A candidate is a schedule, a cluster and tiles. Rules 1 to 4 look at one of these alone, so what is left after them is a
product of three counts; rule 5 needs all three. Where the paper's words can be read in several ways, ``READINGS`` has
them with their counts, and says of two that they were looked for because they fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np

from tilestream.devices import Device
from tilestream.studies.flashfuser.dataflow.chain import Chain, Gate
from tilestream.studies.flashfuser.dataflow.places import places
from tilestream.studies.flashfuser.dataflow.schedule import AXES, SCHEDULES, Cluster, Schedule
from tilestream.studies.flashfuser.dataflow.volumes import Candidates

CLUSTER_SIZES = (1, 2, 4, 8, 16)
GRANULE = 16
"""Of tiles: the MMA that the paper counts with is 16 x 16 x 16."""

LARGEST = 16
"""Blocks of a cluster."""


def divides(size: int, tile: int) -> bool:
    """Rule 1: tiles are 16 times a power of two (which hardware likes) and divide their axis."""
    return size % tile == 0 and tile % GRANULE == 0 and (tile // GRANULE).bit_count() == 1


def cluster_agrees(c: Cluster) -> bool:
    """Rule 2: at most 16 blocks, the same in both products: re-dealt, they are whole shuffle groups and whole sums."""
    return c.blocks <= LARGEST and c.legal


def sums_before_activation(s: Schedule) -> bool:
    """Rule 3: an activation needs all of K. K is the innermost loop, or spatial, its parts summed by all-exchange."""
    return "k" in s.spatial or s.loops[-1:] == "k"


def consumers_can_meet(s: Schedule) -> bool:
    """Rule 4: groups that split L need the same C and cannot talk. L is split inside of a group alone."""
    return "l" not in s.spatial


def fits(chain: Chain, at: Candidates, device: Device) -> np.ndarray:
    """Rule 5: what is held fits into the lowest level it may spill to, DSM, and the ring into shared memory."""
    return places(chain, at, device).on_chip()


@dataclass(frozen=True)
class Step:
    """One line of the paper's count: candidates that are left, and the factors they come from where they have any."""

    rule: str
    what: str
    ours: int
    paper: float
    factors: str = ""

    @property
    def agrees(self) -> bool:
        """To the three digits that the paper prints."""
        return abs(self.ours / self.paper - 1) < 0.005


PAPER = (2.75e13, 1.14e8, 2.47e7, 1.44e7, 9.62e6, 1.15e6)
"""Section V: M 256, N 16384, K and L 4096."""

RULE1 = 4455 * 625 * 41
"""What rule 1 leaves; the paper prints three digits of it."""

PAPERS_EXAMPLE = Chain("GPT-6.7B", 256, 16384, 4096, 4096)


def counts(chain: Chain, device: Device) -> list[Step]:
    """Candidates before any rule and after each of the five."""
    clusters = [Cluster(*c) for c in product(CLUSTER_SIZES, repeat=4)]
    tiles = {a: tiles_of(chain, a) for a in AXES}
    points = {a: -(-chain.size(a) // GRANULE) for a in AXES}
    every, divided = _product(points[a] for a in AXES), _product(len(tiles[a]) for a in AXES)
    agreeing = [c for c in clusters if cluster_agrees(c)]
    summed = [s for s in SCHEDULES if sums_before_activation(s)]
    meeting = [s for s in summed if consumers_can_meet(s)]
    left = sum(int(fits(chain, at, device).sum()) for at in spaces(chain, meeting, agreeing, tiles))
    lines = (
        ("none", "41 schedules, cluster sizes 1 to 16, tiles of 16", len(SCHEDULES), len(clusters), every),
        ("1 tiles", "tiles that divide, 16 times a power of two", len(SCHEDULES), len(clusters), divided),
        ("2 clusters", "at most 16 blocks, the same in both products", len(SCHEDULES), len(agreeing), divided),
        ("3 activation", "K innermost, or spatial", len(summed), len(agreeing), divided),
        ("4 dependency", "L not spatial", len(meeting), len(agreeing), divided),
    )
    steps = [
        Step(rule, what, a * b * c, paper, f"{a:,} schedules x {b:,} clusters x {c:,} tiles")
        for (rule, what, a, b, c), paper in zip(lines, PAPER, strict=False)
    ]
    return [*steps, Step("5 capacity", "C, partial E and the ring on chip", left, PAPER[5])]


READINGS: tuple[tuple[str, str, Callable[[], int], float], ...] = (
    (
        "2 clusters",
        "m n k <= 16 and m l n <= 16: each product's own axes, as the words say",
        lambda: _clusters(lambda c: c.blocks <= LARGEST and c.m * c.l * c.n <= LARGEST),
        625 * PAPER[2] / RULE1,
    ),
    (
        "2 clusters",
        "m n k <= 16 and m l max(1, n k / l) <= 16: each product's blocks, sums need not be whole",
        lambda: _clusters(lambda c: c.blocks <= LARGEST and c.m * max(c.l, c.n * c.k) <= LARGEST),
        625 * PAPER[2] / RULE1,
    ),
    (
        "2 clusters",
        "whole shuffle groups and whole sums: the index map that both examples of Fig. 7 fit (rule 2 here)",
        lambda: _clusters(cluster_agrees),
        625 * PAPER[2] / RULE1,
    ),
    (
        "2 clusters",
        "n k l <= 16 and l <= n k: in no sentence of the paper, found by looking for 135",
        lambda: _clusters(lambda c: c.n * c.k * c.l <= LARGEST and c.l <= c.n * c.k),
        625 * PAPER[2] / RULE1,
    ),
    (
        "3 activation",
        "K innermost or spatial (rule 3 here)",
        lambda: sum(map(sums_before_activation, SCHEDULES)),
        41 * PAPER[3] / PAPER[2],
    ),
    (
        "3 activation",
        "the first product's loops in the order M, N, K: in no sentence of the paper, found by looking for 24",
        lambda: sum(map(_in_order, SCHEDULES)),
        41 * PAPER[3] / PAPER[2],
    ),
    (
        "4 dependency",
        "L not spatial, after K innermost or spatial (rules 3 and 4 here)",
        lambda: sum(sums_before_activation(s) and consumers_can_meet(s) for s in SCHEDULES),
        41 * PAPER[4] / PAPER[2],
    ),
    (
        "4 dependency",
        "L not spatial, after that order",
        lambda: sum(_in_order(s) and consumers_can_meet(s) for s in SCHEDULES),
        41 * PAPER[4] / PAPER[2],
    ),
)
"""Rule, a reading of it, what it leaves of 625 clusters or 41 schedules, and what the paper's counts imply."""


def tiles_of(chain: Chain, axis: str) -> list[int]:
    """Tiles of ``axis`` that rule 1 leaves."""
    size = chain.size(axis)
    return [t for t in (GRANULE << i for i in range(size.bit_length())) if t <= size and divides(size, t)]


def spaces(
    chain: Chain, schedules: list[Schedule], clusters: list[Cluster], tiles: dict[str, list[int]]
) -> Iterator[Candidates]:
    """All clusters and tiles of each schedule as arrays, one dimension each for the clusters and M, N, K and L."""
    shape = {a: (1,) * (1 + i) + (-1,) + (1,) * (3 - i) for i, a in enumerate(AXES)}
    block = {a: np.array(tiles[a], dtype=np.int64).reshape(shape[a]) for a in AXES}
    over = {a: np.array([getattr(c, a) for c in clusters], dtype=np.int64).reshape(-1, 1, 1, 1, 1) for a in AXES}
    along = over if chain.gate is not Gate.SPATIAL else {**over, "k": np.ones_like(over["k"])}
    trips = {a: -(-chain.size(a) // (along[a] * block[a])) for a in AXES}
    for schedule in schedules:
        yield Candidates(schedule, over, block, trips)


def _clusters(legal: Callable[[Cluster], bool]) -> int:
    return sum(legal(Cluster(*c)) for c in product(CLUSTER_SIZES, repeat=4))


def _in_order(s: Schedule) -> bool:
    own = [a for a in s.loops if a != "l"]
    return own == sorted(own, key="mnk".index)


def _product(values: Iterator[int]) -> int:
    made = 1
    for value in values:
        made *= value
    return made
