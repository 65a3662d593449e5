"""From a region's trees of views to loops: the fused iteration of its fusion table as one nest an output.

A view that reduces is made where the loops of its own indices outside the reduction are open, into a number or, over
the indices inside, a row of its own (what a sparse accumulator holds). Everything else is computed where its indices
are known. A compressed level without whose coordinate a value would be what is not stored anyway drives its loop.

Where a product with a dense matrix is made row after row, the outermost loop is cut into tiles: the rows of a tile are
made together, view after view, so that the matrix is read once a tile, and what lies between them stays in cache.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

from tilestream.errors import SparseError
from tilestream.sparse.cpu import products
from tilestream.sparse.cpu.expressions import COSTLY, expression, number
from tilestream.sparse.cpu.making import Making
from tilestream.sparse.cpu.registers import ROWS
from tilestream.sparse.cpu.scope import Array, Scope, Tile
from tilestream.sparse.fusion import Leaf, Op, View, below
from tilestream.sparse.region import Region

TILE = 64
"""Rows of a tile at most."""
PANEL = 1 << 16
"""Elements of a view's rows in a tile, about: half of what a core's second-level cache holds, or less."""


class Nests(Making):
    """The code of one region."""

    def __init__(self, region: Region, dense: Collection[str], free: Collection[str]) -> None:
        super().__init__(region, dense, free)
        self.parallel: list[bool] = []
        self._users = Counter(kid for view in self.fused.views if isinstance(view, Op) for kid in {*view.operands})

    def source(self) -> str:
        """Code of a function a result, ``nest_0`` and so on, one to run after the other: of the ``part`` of ``parts``
        to do, the arrays of ``arguments``, those of the results, and ``sizes``.

        ``parallel`` says which of them can be done in parts, at the same time: they share no element of the result.
        """
        made: dict[View, Array] = {}
        nests: list[list[str]] = []
        for name, op in self.fused.roots.items():
            result = Array(self.name(f"out_{name}"), op.indices)
            self.lines, self.buffers = [], {}
            self.nest(op, result, Scope(rows=dict(made)), whole=True)
            made[op] = result
            head = [f"    {name} = np.empty({size}, {dtype})" for name, (size, dtype) in self.buffers.items()]
            nests.append([*head, *self.lines, "    return"])
        given = (*self.arguments.values(), *(array.name for array in made.values()), *self.sizes.values())
        named = [f"def nest_{n}({', '.join(('part', 'parts', *given))}):" for n in range(len(nests))]
        return "\n\n\n".join("\n".join([head, *lines]) for head, lines in zip(named, nests, strict=True))

    # -- loops --------------------------------------------------------------------------------------------------------

    def nest(self, op: Op, target: Array | str, scope: Scope, whole: bool = False) -> None:
        """Code that makes all of a view that is left under the open loops, in an array or a variable; ``whole``: the
        part of a result that a thread has to make."""
        loops = sorted({*op.indices, *op.reduced} - scope.bound.keys(), key=self.rank.__getitem__)
        if set(op.reduced) & (scope.bound.keys() | scope.tiles.keys()):
            raise SparseError(f"{op} reduces an index whose loop is open", "choose another order, or fuse less")
        if isinstance(target, str):
            self.emit(f"{target} = {number(self._start(op))}")
        loops = products.arranged(self, op, loops)
        inner, depth = scope.inner(), self.depth
        inner.places, inner.parts = {}, {}
        self.catch_up(op, inner)
        if whole:
            self._divide(op, loops, inner)
        if size := self._tiled(op, loops, inner):
            for kid in op.operands:
                self.settle(kid, inner)  # what no tile changes
            part = inner.parts.get(loops[0], Tile("0", self.size(loops[0]), 0))
            first, last = self.name("first"), self.name("last")
            self.emit(f"for {first} in range({part.first}, {part.last}, {size}):")
            self.depth += 1
            self.emit(f"{last} = min({first} + {size}, {part.last})")
            inner.tiles[loops[0]] = Tile(first, last, size)
        self._inside(op, loops, target, inner, isinstance(target, Array))
        self.depth = depth

    def _divide(self, op: Op, loops: list[str], scope: Scope) -> None:
        """Cut a loop of the result into a part a thread: the outermost one that the result keeps and that goes over all
        coordinates, so that no two threads write one element and every element is summed as one thread would."""
        kept = [index for index in loops if index in op.indices]
        for index in [i for i in kept if i != op.indices[-1]] or kept:  # kernels make whole rows
            if not (self.leading(op, index, scope) if index == loops[0] else self._compressed(op, index)):
                first, last, size = self.name("from"), self.name("to"), self.size(index)
                self.emit(f"{first} = {size} * part // parts")
                self.emit(f"{last} = {size} * (part + 1) // parts")
                scope.parts[index] = Tile(first, last, self.fused.sizes[index])
                break
        self.parallel.append(bool(scope.parts))

    def _compressed(self, op: Op, index: str) -> bool:
        """Whether a leaf that the loops of a view go along has an index compressed."""
        for leaf in self.reached(op):
            form = self.format(leaf)
            if index in leaf.indices and form.levels[form.order.index(leaf.indices.index(index))] == "compressed":
                return True
        return False

    def _start(self, op: Op) -> float:
        if not op.reduced:
            return op.fill
        return 0.0 if op.statement.reduction == "add" else -math.inf

    def _tiled(self, op: Op, loops: list[str], scope: Scope) -> int:
        """How many coordinates of the outermost loop make a tile; 0 if there is nothing to gain by tiles."""
        if not loops or loops[0] in op.reduced or scope.tiles:
            return 0
        index, rows, useful = loops[0], 1, False
        for view in below([op]):
            if isinstance(view, Leaf):
                if view.tensor not in self.dense and index in view.indices:
                    form = self.format(view)
                    if form.levels[form.order.index(view.indices.index(index))] == "compressed":
                        return 0  # its coordinates would drive the loop
            elif index in view.indices and view.reduced:
                inside = [i for i in view.indices if i != index and i not in scope.bound]
                rows = max(rows, math.prod(self.fused.sizes[i] for i in inside)) if view is not op else rows
                made = any(isinstance(one, Op) for one in view.operands)
                useful |= products.is_product(self.dense, view) and (view is not op or made)
        if not useful or rows * ROWS > 4 * PANEL:
            return 0
        size = max(ROWS, min(TILE, PANEL // rows) // ROWS * ROWS)
        return min(size, max(1, self.fused.sizes[index]))

    def _inside(self, op: Op, loops: list[str], target: Array | str, scope: Scope, fresh: bool) -> None:
        """The loops that are left; ``fresh``: nothing is in the target yet, not even what it starts with."""
        for kid in op.operands:
            self.settle(kid, scope)
        if not loops:
            value = expression(op.statement, [scope.values.get(v, "") for v in op.operands])
            self._put(op, target, value, scope, fresh)
            return
        if isinstance(target, Array):
            if products.multiply(self, op, loops, target, scope):
                return
            if products.sum_rows(self, op, loops, target, scope, fresh):
                return
        local = target
        if isinstance(target, Array) and op.reduced and set(loops) <= set(op.reduced):
            local = self.variable(number(self._start(op)), "sum")
        elif isinstance(target, Array) and fresh and (loops[0] in op.reduced or self.leading(op, loops[0], scope)):
            self._fill(op, target, scope)
            fresh = False
        depth, inner = self.depth, scope.inner()
        self.enter(op, loops[0], inner)
        self._inside(op, loops[1:], local, inner, fresh and local is target)
        self.depth = depth
        if local is not target:
            assert isinstance(local, str)
            self._put(op, target, local, scope, fresh)

    def _fill(self, op: Op, target: Array, scope: Scope) -> None:
        """Put into the target what it starts with, as far as its loops are not open."""
        depth, inner, left = self.depth, scope.inner(), list(target.dims)
        size = 1
        while left and left[-1] not in scope.bound and (not scope.range(left[-1]) or left[-1] == target.local):
            size *= self.layout.extent(target, left.pop(), scope)  # these lie together
        for index in left:
            if index not in scope.bound:
                inner.bound[index] = self.name("z")
                self.emit(f"for {inner.bound[index]} in {self.range(index, scope)}:")
                self.depth += 1
        at = self.layout.at(target, inner)
        self.emit(f"for z in range({size}):")
        self.emit(f"    {target.name}[np.uint64({at} + z)] = {number(self._start(op))}")
        self.depth = depth

    def _put(self, op: Op, target: Array | str, value: str, scope: Scope, fresh: bool) -> None:
        where = target if isinstance(target, str) else self.layout.element(target, scope)
        if not op.reduced or fresh:
            self.emit(f"{where} = {value}")
        elif op.statement.reduction == "add":
            self.emit(f"{where} += {value}")
        else:
            one = self.variable(value, "one")
            self.emit(f"if {one} > {where} or {one} != {one}:")
            self.emit(f"    {where} = {one}")

    # -- values -------------------------------------------------------------------------------------------------------

    def settle(self, view: View, scope: Scope) -> None:
        """Make what can be made of a view with the loops and tiles that are open."""
        if view in scope.values:
            return
        known = set(view.indices) <= scope.bound.keys()
        if isinstance(view, Leaf):
            if known:
                self.load(view, scope)
            return
        if view.reduced and view not in scope.rows:
            if self._outside(view) <= scope.bound.keys() | scope.tiles.keys():
                self.row(view, self._left(view, scope), scope)
            else:
                self._settle_inside(view, scope)
        elif not view.reduced and view not in scope.rows:
            for kid in view.operands:
                self.settle(kid, scope)
            if known and all(v in scope.values for v in view.operands):
                made = expression(view.statement, [scope.values[v] for v in view.operands])
                if view.statement.op == "mask":
                    made = self._masked(view, made, scope)
                scope.values[view] = self.variable(made, f"v_{view.name}")
            elif self._worth_keeping(view, scope):
                self.row(view, self._left(view, scope), scope)
        if view in scope.rows and known:
            scope.values[view] = self.variable(self.layout.element(scope.rows[view], scope), f"v_{view.name}")

    def _outside(self, op: Op) -> set[str]:
        """Indices whose loops a view that reduces is made in: those outside its reduction, but for the innermost one
        of a product of matrices."""
        first = min(self.rank[r] for r in op.reduced)
        found = sorted((i for i in op.indices if self.rank[i] < first), key=self.rank.__getitem__)
        return set(found[:-1] if len(found) > 1 and products.is_product(self.dense, op) else found)

    def _left(self, op: Op, scope: Scope) -> tuple[str, ...]:
        """Indices of a view whose loops are not open, outermost first."""
        return tuple(sorted({*op.indices} - scope.bound.keys(), key=self.rank.__getitem__))

    def _settle_inside(self, op: Op, scope: Scope) -> None:
        """Make rows that a reduction reads before its own loops open, so that they are made once."""
        for kid in op.operands:
            if isinstance(kid, Op):
                self.settle(kid, scope) if kid.reduced else self._settle_inside(kid, scope)

    def _worth_keeping(self, op: Op, scope: Scope) -> bool:
        """Whether a row of something costly, an exponential, is read again, and can be made where only one is open."""
        if op.statement.op not in COSTLY or self._users[op] < 2 or not products.is_dense(self.dense, op):
            return False
        return len([i for i in op.indices if i not in scope.bound and i not in scope.tiles]) == 1

    def _masked(self, op: Op, value: str, scope: Scope) -> str:
        """A mask whose entry may be missing here decides between the value and its fill."""
        mask = op.operands[1]
        if not isinstance(mask, Leaf) or mask.tensor in self.dense:
            return f"({value} if {scope.values[mask]} != 0.0 else {number(op.fill)})"
        place = scope.places[mask]
        return f"({value} if {place.position} >= 0 else {number(op.fill)})" if place.missing else value

    def row(self, op: Op, dims: tuple[str, ...], scope: Scope) -> None:
        """Make a view where it is: a number, or an array over the indices whose loops are not open."""
        if not dims:
            made = self.name(f"t_{op.name}")
            self.nest(op, made, scope)
            scope.values[op] = made
            return
        local = next((i for i in dims if i in scope.tiles), "")
        sizes = [scope.tiles[i].size if i == local else self.fused.sizes[i] for i in dims]
        array = Array(self.buffer(f"row_{op.name}", math.prod(sizes)), dims, local)
        self.nest(op, array, scope)
        scope.rows[op] = array
