"""Which axes the dimensions of values have: found by what operators do to shapes, whatever their sizes are called.

Values of one region share their axes. ``[edges, 4, 16]``, ``[edges, 64]`` behind a view and ``[edges, 4, 1]`` beside it
are written over two axes, 4 and 16: a dimension is a product of axes, or of none where it is 1 or repeats.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod

from tilestream.graph.nodes import Unsupported

Dim = tuple[int, ...]
"""Numbers of axes whose product a dimension is, outermost first."""


@dataclass
class Space:
    """Axes by number: what size each has, and what it was found to be made of."""

    _sizes: list[int] = field(default_factory=list)
    _made_of: dict[int, Dim] = field(default_factory=dict)

    def new(self, sizes: Iterable[int]) -> tuple[Dim, ...]:
        """A dimension for each size; without an axis where that is 1."""
        return tuple(() if size == 1 else (self._axis(size),) for size in sizes)

    def _axis(self, size: int) -> int:
        self._sizes.append(size)
        return len(self._sizes) - 1

    def leaves(self, dim: Iterable[int]) -> Dim:
        """The axes of a dimension as far as they are known by now."""
        found: list[int] = []
        for axis in dim:
            parts = self._made_of.get(axis)
            found += [axis] if parts is None else self.leaves(parts)
        return tuple(found)

    def size(self, axis: int) -> int:
        return self._sizes[axis]

    def extent(self, dim: Dim) -> int:
        """Positions of a dimension."""
        return prod(self._sizes[axis] for axis in dim)

    def unify(self, a: Dim, b: Dim) -> None:
        """Let two dimensions of one extent have the same axes.

        Raises:
            Unsupported: they are cut at places that do not fit together.
        """
        left, right = list(self.leaves(a)), list(self.leaves(b))
        while left and right:
            p, q = left[0], right[0]
            if p == q:
                left, right = left[1:], right[1:]
                continue
            m, n = self._sizes[p], self._sizes[q]
            if m == n:
                self._made_of[q] = (p,)
            elif m > n:
                self._split(p, n)
            else:
                self._split(q, m)
            left, right = list(self.leaves(left)), list(self.leaves(right))
        if left or right:
            raise Unsupported("its operands have features of different sizes")

    def _split(self, axis: int, outer: int) -> None:
        """Cut an axis in two, of which the outer one has ``outer`` positions."""
        whole = self._sizes[axis]
        if whole % outer:
            raise Unsupported("its operands cut their features at places that do not fit together")
        self._made_of[axis] = (self._axis(outer), self._axis(whole // outer))

    def viewed(self, dims: Sequence[Dim], sizes: Sequence[int]) -> tuple[Dim, ...]:
        """The dimensions of another shape of the same elements in the same order.

        Raises:
            Unsupported: it cuts axes at places that do not fit together.
        """
        left = [axis for dim in dims for axis in self.leaves(dim)]
        found: list[Dim] = []
        for size in sizes:
            dim: list[int] = []
            while self.extent(tuple(dim)) < size:
                if not left:
                    raise Unsupported("a view of repeated elements")
                room = size // self.extent(tuple(dim))
                if self._sizes[left[0]] > room:
                    self._split(left[0], room)
                    left = list(self.leaves(left))
                dim.append(left.pop(0))
            if self.extent(tuple(dim)) != size:
                raise Unsupported("a view that joins parts of dimensions")
            found.append(tuple(dim))
        if left:
            raise Unsupported("a view that leaves elements out")
        return tuple(found)

    def share(self, values: Sequence[Sequence[Dim]]) -> None:
        """Let axes of one size that no value has both of be one, where every value still has its own in one order."""
        rows = [{axis for dim in dims for axis in self.leaves(dim)} for dims in values]
        axes = sorted(set().union(*rows))
        for n, axis in enumerate(axes):
            for other in axes[:n]:
                alike = self._sizes[axis] == self._sizes[other] and other not in self._made_of
                if not alike or any({axis, other} <= set(row) for row in rows):
                    continue
                self._made_of[axis] = (other,)
                try:
                    self.ordered(values)
                except Unsupported:
                    del self._made_of[axis]
                else:
                    rows = [{other if a == axis else a for a in row} for row in rows]
                    break

    def ordered(self, values: Iterable[Sequence[Dim]]) -> dict[int, int]:
        """A place for each axis, so that every value has its own in this order.

        Raises:
            Unsupported: two values have two axes in different orders.
        """
        after: dict[int, set[int]] = {}
        for dims in values:
            row = [axis for dim in dims for axis in self.leaves(dim)]
            for i, axis in enumerate(row):
                after.setdefault(axis, set()).update(row[i + 1 :])
        places: dict[int, int] = {}
        while len(places) < len(after):
            first = [a for a in after if a not in places and not any(a in after[b] for b in after if b not in places)]
            if not first:
                raise Unsupported("it transposes features")
            places[first[0]] = len(places)
        return places
