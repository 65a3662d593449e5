"""Stored tensors along the loops of generated code: which level drives a loop, and how the others keep up with it."""

from __future__ import annotations

import math
import re
from collections.abc import Collection

from tilestream.errors import SparseError
from tilestream.sparse.cpu.expressions import number
from tilestream.sparse.cpu.scope import Array, Layout, Place, Scope
from tilestream.sparse.fusion import Leaf, Op, View
from tilestream.sparse.region import Region
from tilestream.sparse.storage import Format

FEW = 16
"""A matrix of which fewer rows than one in so many have an entry is stored without the others."""
MOST_ROWS = 1 << 26
"""Rows of a matrix that is stored with all of them."""


class Leaves:
    """Loops over the indices of a region, and what its leaves have there.

    ``dense``: leaves that are plain arrays in the order of their tensor's dimensions; those that are ``free`` in the
    order that suits the loops instead. ``arguments``: what the code takes, by tensor (or its view) and array: ``seg``
    and ``crd`` of a level, ``values``, or ``values`` and the order of a plain array's dimensions. ``sizes``: indices
    whose sizes it takes as well.
    """

    def __init__(self, region: Region, dense: Collection[str], free: Collection[str]) -> None:
        if region.fused is None or region.graph.block > 1:
            raise SparseError(f"region {region.name!r} in blocks", "use block=1 for the CPU")
        self.region, self.fused, self.dense, self.free = region, region.fused, dense, free
        self.rank = {index: n for n, index in enumerate(region.order)}
        self.layout = Layout(self.fused.sizes)
        self.lines: list[str] = []
        self.arguments: dict[tuple[str, str], str] = {}
        self.sizes: dict[str, str] = {}
        self.forms: dict[str, tuple[str, Format]] = {}
        """By the name of a view, the tensor that it is of and how the loops have it stored."""
        self.depth = 1
        self._names: dict[str, int] = {}
        self._drivers: dict[View, frozenset[Leaf]] = {}

    # -- text ---------------------------------------------------------------------------------------------------------

    def emit(self, line: str) -> None:
        self.lines.append("    " * self.depth + line)

    def name(self, base: str) -> str:
        base = re.sub(r"\W", "_", base)
        self._names[base] = self._names.get(base, 0) + 1
        return f"{base}_{self._names[base]}"

    def variable(self, value: str, base: str) -> str:
        made = self.name(base)
        self.emit(f"{made} = {value}")
        return made

    # -- what drives loops --------------------------------------------------------------------------------------------

    def drivers(self, view: View) -> frozenset[Leaf]:
        """Leaves without whose entry a view is what it stands for where nothing is stored."""
        if view not in self._drivers:
            self._drivers[view] = self._found(view)
        return self._drivers[view]

    def _found(self, view: View) -> frozenset[Leaf]:
        if isinstance(view, Leaf):
            return frozenset() if view.tensor in self.dense else frozenset([view])
        return frozenset() if view.reduced else self.before(view)

    def before(self, op: Op) -> frozenset[Leaf]:
        """The same of a statement before its reduction."""
        if op.complete:
            return frozenset()
        kids = [self.drivers(v) for v in op.operands]
        kind = op.statement.op if len(kids) > 1 else "copy"
        if kind in ("mul", "keep") or (kind == "mask" and op.fill == op.operands[0].fill):
            return kids[0] | kids[1]
        if kind == "mask":
            return kids[1]
        if kind == "share":
            return kids[0]
        found = kids[0]
        for one in kids[1:]:
            found &= one
        return found

    def leading(self, op: Op, index: str, scope: Scope) -> list[Leaf]:
        """Leaves whose compressed levels the loop over an index has to meet; the first of them drives it."""
        useful = self.before(op)
        if op.reduced and op.statement.reduction == "max" and self._pre_fill(op) != -math.inf:
            return []  # what is not stored counts as 0
        return [leaf for leaf in self._packed(op, index, scope) if leaf in useful]

    def _packed(self, op: Op, index: str, scope: Scope) -> list[Leaf]:
        """Leaves that go down a compressed level at the loop over an index."""
        moving = [leaf for leaf in self.reached(op) if self._next(leaf, scope) == index]
        return [leaf for leaf in moving if self._kind(leaf, scope) == "compressed"]

    def _pre_fill(self, op: Op) -> float:
        return op.fill if op.statement.op != "copy" else op.operands[0].fill

    def reached(self, op: Op) -> list[Leaf]:
        """Stored leaves that a statement reads along its loops: its own, and those of what it computes on the way."""
        found: dict[Leaf, None] = {}
        stack: list[View] = list(reversed(op.operands))
        while stack:
            view = stack.pop()
            if isinstance(view, Leaf):
                if view.tensor not in self.dense:
                    found[view] = None
            elif not view.reduced:
                stack.extend(reversed(view.operands))
        return list(found)

    # -- loops --------------------------------------------------------------------------------------------------------

    def range(self, index: str, scope: Scope) -> str:
        tile = scope.range(index)
        return f"range({tile.first}, {tile.last})" if tile else f"range({self.size(index)})"

    def size(self, index: str) -> str:
        """The size of an index, as an argument: LLVM unrolls a short loop of known length before it looks for vectors,
        and then finds none."""
        if index not in self.sizes:
            self.sizes[index] = self.name(f"size_{index}")
        return self.sizes[index]

    def open(self, op: Op, index: str, scope: Scope) -> None:
        """Begin the loop over an index, and move every leaf that has it one level down."""
        moving = [leaf for leaf in self.reached(op) if self._next(leaf, scope) == index]
        packed, leading = self._packed(op, index, scope), self.leading(op, index, scope)
        variable = self.name(index)
        ends: dict[Leaf, tuple[str, str]] = {}
        for leaf in packed:
            place = scope.places.get(leaf, Place())
            first, last = self.name("at"), self.name("end")
            seg = self.argument(leaf, f"seg{place.depth}")
            guard = f" if {place.position} >= 0 else 0" if place.missing else ""
            self.emit(f"{first} = {seg}[{place.position}]{guard}")
            self.emit(f"{last} = {seg}[{place.position} + 1]{guard}")
            ends[leaf] = first, last
        if leading:
            lead = leading[0]
            at = self.name("p")
            first, last = ends[lead]
            self.emit(f"for {at} in range({first}, {last}):")
            self.depth += 1
            self.emit(f"{variable} = {self.argument(lead, f'crd{self._levels(lead, scope)}')}[{at}]")
        else:
            lead, at = None, ""
            self.emit(f"for {variable} in {self.range(index, scope)}:")
            self.depth += 1
        scope.bound[index] = variable
        for leaf in moving:
            place = scope.places.get(leaf, Place())
            if leaf is lead:
                scope.places[leaf] = Place(place.depth + 1, at)
            elif leaf in ends:
                scope.places[leaf] = self._walk(leaf, place, ends[leaf], variable, leaf in leading)
            else:
                position = self.name("pos")
                step = f"{place.position} * {self.fused.sizes[index]} + {variable}"
                self.emit(f"{position} = {step}" + (f" if {place.position} >= 0 else -1" if place.missing else ""))
                scope.places[leaf] = Place(place.depth + 1, position, place.missing)

    def _walk(self, leaf: Leaf, place: Place, segment: tuple[str, str], coordinate: str, needed: bool) -> Place:
        """Go along a compressed level to the loop's coordinate; without it, skip the coordinate if it is ``needed``."""
        here, end = segment
        crd = self.argument(leaf, f"crd{place.depth}")
        self.emit(f"while {here} < {end} and {crd}[{here}] < {coordinate}:")
        self.emit(f"    {here} += 1")
        if needed:
            self.emit(f"if {here} == {end} or {crd}[{here}] != {coordinate}:")
            self.emit("    continue")
            return Place(place.depth + 1, here)
        found = self.variable(f"{here} if {here} < {end} and {crd}[{here}] == {coordinate} else -1", "found")
        return Place(place.depth + 1, found, True)

    def catch_up(self, op: Op, scope: Scope) -> None:
        """Move leaves down the levels whose loops are open around this nest: look their coordinates up."""
        for leaf in self.reached(op):
            while (index := self._next(leaf, scope)) in scope.bound:
                place, level = scope.places.get(leaf, Place()), self._levels(leaf, scope)
                position, here = self.name("pos"), scope.bound[index]
                guard = f" if {place.position} >= 0 else -1" if place.missing else ""
                packed = self._kind(leaf, scope) == "compressed"
                if packed:
                    seg, crd = self.argument(leaf, f"seg{level}"), self.argument(leaf, f"crd{level}")
                    found = f"find({crd}, {seg}[{place.position}], {seg}[{place.position} + 1], {here})"
                else:
                    found = f"{place.position} * {self.fused.sizes[index]} + {here}"
                self.emit(f"{position} = {found}{guard}")
                scope.places[leaf] = Place(place.depth + 1, position, place.missing or packed)

    def format(self, leaf: Leaf) -> Format:
        """How the loops have a leaf stored: as its region does, but with all rows where few of them are empty, so that
        the loop over rows can be cut into parts and tiles."""
        form = self.region.views[leaf][1]
        if len(form.levels) < 2 or form.levels[0] != "compressed" or form.block > 1:
            return form
        size = leaf.declared.shape[form.order[0]]
        extents = leaf.declared.extents
        known = leaf.declared.format is not None and leaf.declared.format.order == form.order and bool(extents)
        if size > MOST_ROWS or (known and extents[0] * FEW < size):
            return form
        return Format(("dense", *form.levels[1:]), form.order, form.block)

    def _next(self, leaf: Leaf, scope: Scope) -> str:
        format, depth = self.format(leaf), scope.places.get(leaf, Place()).depth
        return leaf.indices[format.order[depth]] if depth < len(format.order) else ""

    def _levels(self, leaf: Leaf, scope: Scope) -> int:
        return scope.places.get(leaf, Place()).depth

    def _kind(self, leaf: Leaf, scope: Scope) -> str:
        return self.format(leaf).levels[self._levels(leaf, scope)]

    # -- values -------------------------------------------------------------------------------------------------------

    def argument(self, leaf: Leaf, array: str) -> str:
        """The variable of one of a leaf's arrays: ``values``, or ``seg`` and ``crd`` of a level."""
        tensor = leaf.tensor if leaf.tensor in self.dense else self.region.views[leaf][0]
        if leaf.tensor not in self.dense:
            self.forms[tensor] = leaf.tensor, self.format(leaf)
        if (tensor, array) not in self.arguments:
            self.arguments[tensor, array] = self.name(f"in_{tensor}_{array}")
        return self.arguments[tensor, array]

    def plain(self, leaf: Leaf, last: str = "") -> Array:
        """A plain array, in the order of the loops where it is free, or with ``last`` as its innermost index."""
        order = list(range(len(leaf.indices)))
        if leaf.tensor in self.free:
            order.sort(key=lambda d: self.rank[leaf.indices[d]])
        if last:
            order.sort(key=lambda d: leaf.indices[d] == last)
        values = self.argument(leaf, f"values{','.join(map(str, order))}")
        return Array(values, tuple(leaf.indices[d] for d in order))

    def load(self, leaf: Leaf, scope: Scope) -> None:
        """Put the element of a leaf at the open loops into a variable."""
        if leaf.tensor in self.dense:
            got = self.layout.element(self.plain(leaf), scope)
        else:
            place = scope.places.get(leaf, Place())
            if place.depth < len(leaf.indices):
                raise SparseError(f"{leaf} is read before its levels are open", "report the program")
            got = f"{self.argument(leaf, 'values')}[{place.position}]"
            if place.missing:
                got = f"({got} if {place.position} >= 0 else {number(leaf.fill)})"
        scope.values[leaf] = self.variable(got, f"v_{leaf.tensor}")
