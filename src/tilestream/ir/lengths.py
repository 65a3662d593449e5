"""The size of every axis at a call, and how many positions of a ragged one each position around it has: what bytes,
steps and times are counted from.

Of lengths a pipeline does not say; a call does (its bounds), a user may, or it is assumed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from itertools import zip_longest
from math import ceil, exp, lgamma, log, prod, sqrt

from tilestream.errors import InputError
from tilestream.ir.axes import ROWS, Axis, View, around, outer_axes, outermost_first
from tilestream.ir.pipeline import Pipeline
from tilestream.ir.plain import by_rows, plain

MOST_AT_RANDOM = 10_000
"""Beyond it lengths at random are as good as equal: they differ by 1 %."""
EDGES_A_NODE = 10
"""Positions within one, where neither how many there are nor their lengths are known."""


@dataclass(frozen=True)
class Lengths:
    """A histogram: ``counts`` has (length, how many have it), ascending. ``assumed`` says what is not known of it.

    ``each`` has all of them as they lie, where that is known; those that lie together wait for their longest.
    """

    counts: tuple[tuple[int, int], ...]
    assumed: str = ""
    each: tuple[int, ...] = field(default=(), compare=False, repr=False)

    @staticmethod
    def of(lengths: Iterable[int], assumed: str = "") -> Lengths:
        """Of these lengths, as they lie.

        Raises:
            InputError: one is negative: the bounds fall.
        """
        each = tuple(lengths)
        counts = sorted(Counter(each).items())
        if counts and counts[0][0] < 0:
            raise InputError(f"a length of {counts[0][0]}", "give lengths of bounds that never fall")
        return Lengths(tuple(counts), assumed, each)

    @staticmethod
    def equal(outer: int, total: int, assumed: str = "all equal") -> Lengths:
        """``total`` positions shared out as evenly as can be."""
        each, more = divmod(total, outer) if outer else (0, 0)
        return Lengths(tuple((n, many) for n, many in ((each, outer - more), (each + 1, more)) if many), assumed)

    @staticmethod
    def at_random(outer: int, total: int) -> Lengths:
        """``total`` positions, each within any of ``outer``: a Poisson distribution, in whole numbers."""
        mean, assumed = total / outer if outer else 0.0, "each at random"
        if not 0 < mean < MOST_AT_RANDOM:
            return Lengths.equal(outer, total, assumed)
        spread = 6 * sqrt(mean) + 4
        counts = Counter[int]()
        for n in range(max(0, int(mean - spread)), int(mean + spread)):
            counts[n] = min(outer - counts.total(), round(outer * exp(n * log(mean) - mean - lgamma(n + 1))))
        counts[round(mean)] += outer - counts.total()
        while left := total - sum(n * many for n, many in counts.items()):
            step = 1 if left > 0 else -1
            at = max((n for n in counts if n + step >= 0), key=counts.__getitem__)
            moved = min(abs(left), max(1, counts[at] // 2))
            counts[at] -= moved
            counts[at + step] += moved
        return Lengths(tuple(sorted((n, many) for n, many in counts.items() if many)), assumed)

    @cached_property
    def outer(self) -> int:
        return sum(many for _, many in self.counts)

    @cached_property
    def total(self) -> int:
        return sum(n * many for n, many in self.counts)

    @property
    def mean(self) -> float:
        return self.total / self.outer if self.outer else 0.0

    @property
    def largest(self) -> int:
        return self.counts[-1][0] if self.counts else 0

    def steps(self, tile: int) -> int:
        """Steps of ``tile`` that all take, each by itself."""
        return sum(ceil(n / tile) * many for n, many in self.counts)

    def steps_together(self, tile: int, together: int) -> float:
        """Steps of blocks of ``together`` that wait for their longest: as they lie, or else the mean over all ways to
        put them together."""
        if together <= 1 or not self.outer:
            return float(self.steps(tile))
        if self.each:
            return float(sum(ceil(n / tile) * many for n, many in self._longest(together)))
        blocks, below, found = ceil(self.outer / together), 0.0, 0.0
        for n, many in self.counts:
            share = below + many / self.outer
            found += ceil(n / tile) * (share**together - below**together)
            below = share
        return blocks * found

    def _longest(self, together: int) -> Iterable[tuple[int, int]]:
        """A histogram of the longest of each block, as they lie."""
        if together not in self._blocks:
            parts = [self.each[first::together] for first in range(together)]
            self._blocks[together] = Counter(map(max, zip_longest(*parts, fillvalue=0)))
        return self._blocks[together].items()

    @cached_property
    def _blocks(self) -> dict[int, Counter[int]]:
        return {}

    def told(self) -> str:
        """For reports: ``mean 10.0, largest 31``, and what was assumed."""
        text = f"mean {self.mean:.1f}, largest {self.largest}"
        return f"{text}, assumed {self.assumed}" if self.assumed else text


class Sizes(dict[str, int]):
    """The size of every axis of a pipeline at a call, and the lengths of its ragged ones."""

    def __init__(self, size: Mapping[str, int], ragged: Mapping[str, Axis], lengths: Mapping[str, Lengths]) -> None:
        super().__init__(size)
        self.outer, self.lengths = outer_axes(ragged.values()), lengths

    def positions(self, axes: Iterable[str]) -> int:
        """Combinations of positions along ``axes``: of ragged ones, those within one position of the axis around them.

        Two ragged axes within one are taken to be long and short together, as queries and keys of sequences are.
        """
        if not self.outer:
            return prod(self[a] for a in axes)
        own = set(axes)
        inner = own - {a for name in own for a in around((name,), self.outer) if a != name}
        beside: dict[str, list[str]] = {}
        for name in inner & self.outer.keys():
            beside.setdefault(self.outer[name], []).append(name)
        each = [self[names[0]] if len(names) == 1 else self._pairs(names) for names in beside.values()]
        return prod(self[name] for name in inner - self.outer.keys()) * prod(each)

    def _pairs(self, names: Iterable[str]) -> int:
        each = [[n for n, many in self.lengths[name].counts for _ in range(many)] for name in names]
        return sum(map(prod, zip(*each, strict=True)))


def sizes_of(p: Pipeline, size: Mapping[str, int], known: Mapping[str, Lengths] | None = None) -> Sizes:
    """Sizes of all axes that are known or follow, and the lengths of every ragged axis of ``p``.

    Tables of a ragged pipeline are taken to have as many rows as there are nodes.

    Args:
        size: of axes that are read at the call: of nodes and edges, or of one of the two.
        known: lengths where they are known; others are assumed to be equal.

    Raises:
        InputError: lengths are of another number of positions than ``size`` says.
    """
    if isinstance(size, Sizes):
        return size
    p = p if by_rows(p) else plain(p)
    sizes, found = {**p.sizes(), **size}, {}
    for axis in outermost_first(p.ragged):
        given = (known or {}).get(axis.name) or _assumed(axis, sizes)
        if given is None:
            continue
        found[axis.name] = given
        for name, there in ((axis.of, given.outer), (axis.name, given.total)):
            if sizes.setdefault(name, there) != there:
                raise InputError(
                    f"the lengths of {axis.name!r} are of {there} {name!r}, and there are {sizes[name]}",
                    "give the lengths of this call",
                )
        sizes.setdefault(p.tensor(axis.bounds).axes[0].name, given.outer + 1)
    rows = max((sizes[axis] for axis in outermost(p) if axis in sizes), default=None)
    if p.ragged and rows is not None:  # tables that nobody says anything of
        sizes = {**{axis.name: rows for axis in p.axes() if axis.size is None}, **sizes}
    if not p.ragged:
        sizes = {**_implied(p, sizes), **sizes}
    return Sizes(sizes, p.ragged, found)


def _implied(p: Pipeline, size: Mapping[str, int]) -> dict[str, int]:
    """Sizes that follow from others: of what a row's place divided is a coordinate, as images are of pixels."""
    axes = {t.name: t.axes for t in p.tensors}
    found = {}
    views = (v for s in p.stages for op in s.ops for v in op.tensors if isinstance(v, View) and v.of in axes)
    for view in views:
        for axis, at in zip(axes[view.of], view.at or (), strict=False):
            one = at.axes[0] if len(at.axes) == 1 else ""
            if axis.size is None and axis.name != one and one in size and not at.index and not at.within:
                found[axis.name] = ceil(size[one] / at.over)
    return found


def sizes_at(p: Pipeline, rows: int, edges: int = 0) -> Sizes:
    """``sizes_of`` a call with so many rows, or nodes of a ragged pipeline, and edges where that is known: not 0."""
    each = dict.fromkeys(outermost(p) or [ROWS.name], rows)
    return sizes_of(p, each | (dict.fromkeys(p.ragged, edges) if edges else {}))


def outermost(p: Pipeline) -> list[str]:
    """Axes that lie around ragged ones and within none: the nodes of edges."""
    return sorted({a.of for a in p.ragged.values()} - p.ragged.keys())


def _assumed(axis: Axis, sizes: Mapping[str, int]) -> Lengths | None:
    if axis.of not in sizes:
        return None
    if axis.name in sizes:
        return Lengths.equal(sizes[axis.of], sizes[axis.name])
    return Lengths.equal(sizes[axis.of], EDGES_A_NODE * sizes[axis.of], f"{EDGES_A_NODE} each")
