"""From a region's trees of views to loops: the fused iteration of its fusion table as one nest an output.

A view that reduces is made where the loops of its own indices outside the reduction are open, into a number or, over
the indices inside, a row of its own (what a sparse accumulator holds). Everything else is computed where its indices
are known. A compressed level without whose coordinate a value would be what is not stored anyway drives its loop.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from tilestream.errors import SparseError
from tilestream.sparse.cpu.expressions import expression, number
from tilestream.sparse.fusion import Leaf, Op, View
from tilestream.sparse.region import Region
from tilestream.sparse.storage import Format


@dataclass(frozen=True)
class Place:
    """Where a leaf stands: the variable of its position under ``depth`` levels; ``missing``: it may be -1."""

    depth: int = 0
    position: str = "0"
    missing: bool = False


@dataclass
class Scope:
    """What is known at a point of the code: open loops, values in variables, rows in arrays, leaves on their way."""

    bound: dict[str, str] = field(default_factory=dict)
    values: dict[View, str] = field(default_factory=dict)
    rows: dict[View, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    places: dict[Leaf, Place] = field(default_factory=dict)

    def inner(self) -> Scope:
        return Scope(dict(self.bound), dict(self.values), dict(self.rows), dict(self.places))


@dataclass(frozen=True)
class Target:
    """What a nest writes: a variable, or an array with its dimensions."""

    name: str
    dims: tuple[str, ...] | None = None


class Nests:
    """The code of one region.

    ``dense``: leaves that are plain arrays in the order of their tensor's dimensions; those that are ``free`` in the
    order of the loops instead. ``arguments``: what its function takes, by tensor (or its view) and array: ``seg`` and
    ``crd`` of a level, ``values``, or ``values`` and the order of a plain array's dimensions.
    """

    def __init__(self, region: Region, dense: Collection[str], free: Collection[str]) -> None:
        if region.fused is None or region.graph.block > 1:
            raise SparseError(f"region {region.name!r} in blocks", "use block=1 for the CPU")
        self.region, self.fused, self.dense, self.free = region, region.fused, dense, free
        self.rank = {index: n for n, index in enumerate(region.order)}
        self.lines: list[str] = []
        self.arguments: dict[tuple[str, str], str] = {}
        self.buffers: dict[str, int] = {}
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

    def source(self) -> str:
        """Code of a function ``region``, which takes the arrays of ``arguments`` and then those of the results."""
        made: dict[View, tuple[str, tuple[str, ...]]] = {}
        results = []
        for name, op in self.fused.roots.items():
            result = self.name(f"out_{name}")
            results.append(result)
            self.nest(op, Target(result, op.indices), Scope(rows=dict(made)))
            made[op] = result, op.indices
        head = [f"    {name} = np.empty({size})" for name, size in self.buffers.items()]
        arguments = (*self.arguments.values(), *results)
        return "\n".join([f"def region({', '.join(arguments)}):", *head, *self.lines, "    return"])

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
        if kind == "div":
            return kids[0]
        found = kids[0]
        for one in kids[1:]:
            found &= one
        return found

    # -- loops --------------------------------------------------------------------------------------------------------

    def nest(self, op: Op, target: Target, scope: Scope) -> None:
        """Code that makes all of a view that is left under the open loops."""
        loops = sorted({*op.indices, *op.reduced} - scope.bound.keys(), key=self.rank.__getitem__)
        if set(op.reduced) & scope.bound.keys():
            raise SparseError(f"{op} reduces an index whose loop is open", "choose another order, or fuse less")
        start = number(self._start(op))
        if target.dims is None:
            self.emit(f"{target.name} = {start}")
        else:
            size = math.prod(self.fused.sizes[i] for i in target.dims)
            self.emit(f"for z in range({size}):")
            self.emit(f"    {target.name}[z] = {start}")
        inner = scope.inner()
        inner.places = {}
        self._catch_up(op, inner)
        self._inside(op, loops, target, inner)

    def _start(self, op: Op) -> float:
        if not op.reduced:
            return op.fill
        return 0.0 if op.statement.reduction == "add" else -math.inf

    def _inside(self, op: Op, loops: list[str], target: Target, scope: Scope) -> None:
        for kid in op.operands:
            self.settle(kid, scope)
        if not loops:
            fills = [v.fill for v in op.operands]
            value = expression(op.statement, [scope.values.get(v, "") for v in op.operands], fills)
            self._put(op, target, value, scope)
            return
        local = target
        if target.dims is not None and op.reduced and set(loops) <= set(op.reduced):
            local = Target(self.name("sum"))
            self.emit(f"{local.name} = {number(self._start(op))}")
        depth = self.depth
        inner = scope.inner()
        self._open(op, loops[0], inner)
        self._catch_up(op, inner)
        self._inside(op, loops[1:], local, inner)
        self.depth = depth
        if local is not target:
            self._put(op, target, local.name, scope)

    def _put(self, op: Op, target: Target, value: str, scope: Scope) -> None:
        where = target.name
        if target.dims is not None:
            where = self._element(target.name, target.dims, scope)
        if not op.reduced:
            self.emit(f"{where} = {value}")
        elif op.statement.reduction == "add":
            self.emit(f"{where} += {value}")
        else:
            one = self.name("one")
            self.emit(f"{one} = {value}")
            self.emit(f"if {one} > {where} or {one} != {one}:")
            self.emit(f"    {where} = {one}")

    def _at(self, dims: Sequence[str], scope: Scope) -> str:
        """The place of the open loops' coordinates in a flat array."""
        text = ""
        for index in dims:
            here = scope.bound[index]
            text = f"({text}) * {self.fused.sizes[index]} + {here}" if text else here
        return text or "0"

    def _element(self, array: str, dims: Sequence[str], scope: Scope) -> str:
        """An element of a flat array. Its place is never negative, and compiled code need not look whether it is."""
        return f"{array}[np.uint64({self._at(dims, scope)})]"

    def _open(self, op: Op, index: str, scope: Scope) -> None:
        """Begin the loop over an index, and move every leaf that has it one level down."""
        moving = [leaf for leaf in self._reached(op) if self._next(leaf, scope) == index]
        packed = [leaf for leaf in moving if self._kind(leaf, scope) == "compressed"]
        useful = self.before(op)
        if op.reduced and op.statement.reduction == "max" and self._pre_fill(op) != -math.inf:
            useful = frozenset()  # what is not stored counts as 0
        leading = [leaf for leaf in packed if leaf in useful]
        variable = self.name(index)
        ends: dict[Leaf, tuple[str, str]] = {}
        for leaf in packed:
            place, level = scope.places.get(leaf, Place()), self._levels(leaf, scope)
            first, last = self.name("at"), self.name("end")
            seg = self._argument(leaf, f"seg{level}")
            if place.missing:
                self.emit(f"{first} = {seg}[{place.position}] if {place.position} >= 0 else 0")
                self.emit(f"{last} = {seg}[{place.position} + 1] if {place.position} >= 0 else 0")
            else:
                self.emit(f"{first} = {seg}[{place.position}]")
                self.emit(f"{last} = {seg}[{place.position} + 1]")
            ends[leaf] = first, last
        if leading:
            lead = leading[0]
            at = self.name("p")
            first, last = ends[lead]
            self.emit(f"for {at} in range({first}, {last}):")
            self.depth += 1
            self.emit(f"{variable} = {self._argument(lead, f'crd{self._levels(lead, scope)}')}[{at}]")
        else:
            lead, at = None, ""
            self.emit(f"for {variable} in range({self.fused.sizes[index]}):")
            self.depth += 1
        scope.bound[index] = variable
        for leaf in moving:
            place, level = scope.places.get(leaf, Place()), self._levels(leaf, scope)
            if leaf is lead:
                scope.places[leaf] = Place(place.depth + 1, at)
            elif leaf in ends:
                here, end = ends[leaf]
                crd = self._argument(leaf, f"crd{level}")
                self.emit(f"while {here} < {end} and {crd}[{here}] < {variable}:")
                self.emit(f"    {here} += 1")
                if leaf in leading:
                    self.emit(f"if {here} == {end} or {crd}[{here}] != {variable}:")
                    self.emit("    continue")
                    scope.places[leaf] = Place(place.depth + 1, here)
                else:
                    found = self.name("found")
                    self.emit(f"{found} = {here} if {here} < {end} and {crd}[{here}] == {variable} else -1")
                    scope.places[leaf] = Place(place.depth + 1, found, True)
            else:
                position = self.name("pos")
                step = f"{place.position} * {self.fused.sizes[index]} + {variable}"
                self.emit(f"{position} = {step}" + (f" if {place.position} >= 0 else -1" if place.missing else ""))
                scope.places[leaf] = Place(place.depth + 1, position, place.missing)

    def _catch_up(self, op: Op, scope: Scope) -> None:
        """Move leaves down the levels whose loops are open around this nest: look their coordinates up."""
        for leaf in self._reached(op):
            while (index := self._next(leaf, scope)) in scope.bound:
                place, level = scope.places.get(leaf, Place()), self._levels(leaf, scope)
                position, here = self.name("pos"), scope.bound[index]
                guard = f" if {place.position} >= 0 else -1" if place.missing else ""
                packed = self._kind(leaf, scope) == "compressed"
                if packed:
                    seg, crd = self._argument(leaf, f"seg{level}"), self._argument(leaf, f"crd{level}")
                    found = f"find({crd}, {seg}[{place.position}], {seg}[{place.position} + 1], {here})"
                else:
                    found = f"{place.position} * {self.fused.sizes[index]} + {here}"
                self.emit(f"{position} = {found}{guard}")
                scope.places[leaf] = Place(place.depth + 1, position, place.missing or packed)

    def _pre_fill(self, op: Op) -> float:
        return op.fill if op.statement.op != "copy" else op.operands[0].fill

    def _reached(self, op: Op) -> list[Leaf]:
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

    def _format(self, leaf: Leaf) -> Format:
        return self.region.views[leaf][1]

    def _next(self, leaf: Leaf, scope: Scope) -> str:
        format, depth = self._format(leaf), scope.places.get(leaf, Place()).depth
        return leaf.indices[format.order[depth]] if depth < len(format.order) else ""

    def _levels(self, leaf: Leaf, scope: Scope) -> int:
        return scope.places.get(leaf, Place()).depth

    def _kind(self, leaf: Leaf, scope: Scope) -> str:
        return self._format(leaf).levels[self._levels(leaf, scope)]

    def _argument(self, leaf: Leaf, array: str) -> str:
        """The variable of one of a leaf's arrays: ``values``, or ``seg`` and ``crd`` of a level."""
        tensor = leaf.tensor if leaf.tensor in self.dense else self.region.views[leaf][0]
        if (tensor, array) not in self.arguments:
            self.arguments[tensor, array] = self.name(f"in_{tensor}_{array}")
        return self.arguments[tensor, array]

    # -- values -------------------------------------------------------------------------------------------------------

    def settle(self, view: View, scope: Scope) -> None:
        """Make what can be made of a view with the loops that are open."""
        if view in scope.values:
            return
        known = set(view.indices) <= scope.bound.keys()
        if isinstance(view, Leaf):
            if known:
                self._load(view, scope)
            return
        if view.reduced and view not in scope.rows:
            first = min(self.rank[r] for r in view.reduced)
            outside = [i for i in view.indices if self.rank[i] < first]
            if set(outside) <= scope.bound.keys():
                self._row(view, tuple(i for i in view.indices if i not in scope.bound), scope)
            else:
                self._settle_inside(view, scope)
        if view in scope.rows and known:
            array, dims = scope.rows[view]
            scope.values[view] = self._variable(self._element(array, dims, scope), view)
        elif not view.reduced and view not in scope.rows:
            for kid in view.operands:
                self.settle(kid, scope)
            if known and all(v in scope.values for v in view.operands):
                fills = [v.fill for v in view.operands]
                made = expression(view.statement, [scope.values[v] for v in view.operands], fills)
                if view.statement.op == "mask":
                    made = self._masked(view, made, scope)
                scope.values[view] = self._variable(made, view)

    def _settle_inside(self, op: Op, scope: Scope) -> None:
        """Make rows that a reduction reads before its own loops open, so that they are made once."""
        for kid in op.operands:
            if isinstance(kid, Op):
                self.settle(kid, scope) if kid.reduced else self._settle_inside(kid, scope)

    def _masked(self, op: Op, value: str, scope: Scope) -> str:
        """A mask whose entry may be missing here decides between the value and its fill."""
        mask = op.operands[1]
        if not isinstance(mask, Leaf) or mask.tensor in self.dense:
            return f"({value} if {scope.values[mask]} != 0.0 else {number(op.fill)})"
        place = scope.places[mask]
        return f"({value} if {place.position} >= 0 else {number(op.fill)})" if place.missing else value

    def _variable(self, value: str, view: View) -> str:
        made = self.name(f"v_{view.tensor if isinstance(view, Leaf) else view.name}")
        self.emit(f"{made} = {value}")
        return made

    def _load(self, leaf: Leaf, scope: Scope) -> None:
        if leaf.tensor in self.dense:
            order = sorted(range(len(leaf.indices)), key=lambda d: self.rank[leaf.indices[d]])
            order = order if leaf.tensor in self.free else range(len(leaf.indices))
            values = self._argument(leaf, f"values{','.join(map(str, order))}")
            element = self._element(values, [leaf.indices[d] for d in order], scope)
            scope.values[leaf] = self._variable(element, leaf)
            return
        values = self._argument(leaf, "values")
        place = scope.places.get(leaf, Place())
        if place.depth < len(leaf.indices):
            raise SparseError(f"{leaf} is read before its levels are open", "report the program")
        got = f"{values}[{place.position}]"
        if place.missing:
            got = f"({got} if {place.position} >= 0 else {number(leaf.fill)})"
        scope.values[leaf] = self._variable(got, leaf)

    def _row(self, op: Op, dims: tuple[str, ...], scope: Scope) -> None:
        """Make a view that reduces: a number, or a row over the indices inside its reduction."""
        if not dims:
            made = self.name(f"t_{op.name}")
            self.nest(op, Target(made), scope)
            scope.values[op] = made
            return
        made = self.name(f"row_{op.name}")
        self.buffers[made] = math.prod(self.fused.sizes[i] for i in dims)
        self.nest(op, Target(made, dims), scope)
        scope.rows[op] = made, dims
