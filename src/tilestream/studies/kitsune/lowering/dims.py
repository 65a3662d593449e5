"""Which dimensions of a graph's values are one axis.

Every dimension begins as an axis of its own. What an operator says of its operands (``same``) makes axes of different
values one, and a view that divides a dimension divides its axis wherever it stands. Two axes that one operator ranges
over apart (the rows and columns of ``x @ x.T``) are never made one: then an operand is read under another name.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod

from tilestream.graph.nodes import Unsupported

Axes = tuple[int, ...]
"""One dimension: its axes by number, outermost first. A dimension of size 1 has none."""

Shape = tuple[Axes, ...]
"""The dimensions of a value."""


class Dims:
    """Axes by number: which are one, which were divided."""

    def __init__(self) -> None:
        self._size: list[int] = []
        self._one: list[int] = []
        self._parts: dict[int, Axes] = {}
        self._apart: list[Axes] = []
        self._runs: dict[int, Axes] = {}
        self._renamed: set[int] = set()

    def new(self, sizes: Iterable[int]) -> Shape:
        """Dimensions of these sizes, which one operator ranges over apart."""
        made = []
        for size in sizes:
            made.append((self._axis(size),) if size != 1 else ())
        self.apart(made)
        return tuple(made)

    def apart(self, shape: Sequence[Axes]) -> None:
        """Never make two axes of these dimensions one."""
        self._apart.append(tuple(a for axes in shape for a in axes))

    def same(self, a: Sequence[Axes], b: Sequence[Axes]) -> None:
        """The elements of dimensions ``a``, in row-major order, are those of ``b``.

        Raises:
            Unsupported: their sizes have no common division.
        """
        left, right = list(self.leaves(a)), list(self.leaves(b))
        while left and right:
            mine, theirs = self.leaves([(left.pop(),)]), self.leaves([(right.pop(),)])
            x, y = mine[-1], theirs[-1]
            left += mine[:-1]  # an axis may have been divided since
            right += theirs[:-1]
            if self._size[x] == self._size[y]:
                self._join(x, y)
            elif self._size[x] > self._size[y]:
                left.append(self._divided(x, self._size[y]))
                right.append(y)
            else:
                right.append(self._divided(y, self._size[x]))
                left.append(x)
        if left or right:
            raise Unsupported("a view that changes how many elements there are")

    def leaves(self, shape: Sequence[Axes]) -> Axes:
        """The undivided axes of dimensions, outermost first."""
        found: list[int] = []
        for axes in shape:
            for axis in axes:
                axis = self._find(axis)
                found += self.leaves([self._parts[axis]]) if axis in self._parts else (axis,)
        return tuple(found)

    def coalesce(self, shapes: Iterable[Shape]) -> None:
        """Make one of neighbouring axes that are neighbours wherever they stand: ``[batch, tokens]`` are rows."""
        after: dict[int, set[int | None]] = {}
        before: dict[int, set[int | None]] = {}
        for shape in shapes:
            leaves: list[int | None] = [None, *self.leaves(shape), None]
            for x, y in zip(leaves, leaves[1:], strict=False):
                if x is not None:
                    after.setdefault(x, set()).add(y)
                if y is not None:
                    before.setdefault(y, set()).add(x)
        barred = {self._find(a) for a in self._renamed}
        next_of = {
            x: y
            for x, (y, *more) in ((x, tuple(ys)) for x, ys in after.items())
            if not more and y is not None and before[y] == {x} and not {x, y} & barred
        }
        heads = [x for x in after if x not in next_of.values()]
        for x in heads:
            run = [x]
            while run[-1] in next_of:
                run.append(next_of[run[-1]])
            self._runs |= dict.fromkeys(run, tuple(run))

    def axes(self, shape: Sequence[Axes]) -> Axes:
        """The axes of dimensions after ``coalesce``, each by the first of its run."""
        return tuple(x for x in self.leaves(shape) if self._runs.get(x, (x,))[0] == x)

    def size(self, axis: int) -> int:
        """Of an axis as ``axes`` gives it."""
        return prod(self._size[x] for x in self._runs.get(axis, (axis,)))

    def _axis(self, size: int) -> int:
        self._size.append(size)
        self._one.append(len(self._one))
        return len(self._one) - 1

    def _find(self, axis: int) -> int:
        while self._one[axis] != axis:
            self._one[axis] = axis = self._one[self._one[axis]]
        return axis

    def _divided(self, axis: int, inner: int) -> int:
        """``axis``, divided; who asks finds its parts when it looks again."""
        if self._size[axis] % inner:
            raise Unsupported(f"a view that divides {self._size[axis]} elements by {inner}")
        self._parts[axis] = (self._axis(self._size[axis] // inner), self._axis(inner))
        return axis

    def _join(self, x: int, y: int) -> None:
        if x == y:
            return
        for group in self._apart:
            leaves = self.leaves([group])
            if x in leaves and y in leaves:
                self._renamed |= {x, y}
                return
        self._one[y] = x
