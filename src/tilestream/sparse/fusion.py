"""Cross-expression fusion: statements to trees of views with fresh reduction indices (FuseFlow, algorithm 1).

``fuse`` replaces every use of an earlier result by its producer, with the consumer's indices put in. Two uses with
the same indices are one view and computed once; others are views of their own.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from tilestream.errors import SparseError
from tilestream.sparse.einsum import Access, Declared, EinsumProgram, Statement, fresh, subscript
from tilestream.sparse.lowering.ops import fill_after
from tilestream.sparse.orders.pog import PartialOrder

MOST = 1 << 33
"""Elements of a result that has to store all of them, at most: more would take days."""

MOST_VIEWS = 500
"""Views of a region: one that would have more computes nearly everything many times, and is cut in two."""


class NotFusible(Exception):
    """A view cannot be streamed into its consumer in this order: its result has to go through memory."""

    def __init__(self, statement: str, why: str) -> None:
        self.statement, self.why = statement, why
        super().__init__(f"{statement}: {why}")


@dataclass(frozen=True, eq=False)
class Leaf:
    """A view of a tensor in memory. ``indices`` follow the tensor's dimensions."""

    tensor: str
    indices: tuple[str, ...]
    declared: Declared

    def __str__(self) -> str:
        return subscript(self.tensor, self.indices)

    __repr__ = __str__

    @property
    def fill(self) -> float:
        return self.declared.fill

    @property
    def stored(self) -> tuple[str, ...]:
        """Indices in the order of its levels, where a format says one."""
        order = self.declared.format.order if self.declared.format else range(len(self.indices))
        return tuple(self.indices[d] for d in order)


@dataclass(frozen=True, eq=False)
class Op:
    """A view of a statement's result: ``indices`` are the consumer's, ``reduced`` its own.

    ``complete``: its operand must store every coordinate (``lowering.ops.fill_after``). ``pre_fill``: what is not
    stored stands for this before the reduction.
    """

    statement: Statement
    indices: tuple[str, ...]
    reduced: tuple[str, ...]
    operands: tuple[View, ...]
    fill: float
    complete: bool

    def __str__(self) -> str:
        return subscript(self.name, self.indices)

    __repr__ = __str__

    @property
    def name(self) -> str:
        return self.statement.name


View = Leaf | Op


@dataclass
class Fused:
    """A fused region: one view an output, the sizes of the indices, and the order that its tensors ask for."""

    roots: dict[str, Op]
    sizes: dict[str, int]
    order: PartialOrder
    views: list[View] = field(default_factory=list)
    """Every view once, operands before their users."""


@dataclass(frozen=True)
class _Scope:
    """Where a view is made: views ``beside`` it, ``loops`` around it, and the operator that reads it."""

    beside: tuple[View, ...] = ()
    loops: frozenset[str] = frozenset()
    group: str = ""


class _Fuser:
    def __init__(
        self, program: EinsumProgram, statements: Sequence[Statement], known: Mapping[str, Declared], alone: set[str]
    ) -> None:
        self.program, self.known, self.alone = program, known, alone
        self.producers = {s.name: s for s in statements}
        self.made: dict[tuple[str, tuple[str, ...]], View] = {}
        self.used: set[str] = set()
        self.fused = Fused({}, {}, PartialOrder())

    def root(self, statement: Statement) -> None:
        earlier = [v for (name, _), v in self.made.items() if name == statement.name]
        if earlier:  # a result that another statement of the region uses: the same loops make both
            self.fused.roots[statement.name] = next(v for v in earlier if isinstance(v, Op))
            return
        binding = {}
        for dim, index in enumerate(statement.indices):
            size = self.program.shapes[statement.name][dim]
            shared = index in self.used and self.fused.sizes[index] == size and not self._reduced(index)
            free = (shared or index not in self.used) and index not in binding.values()
            binding[index] = index if free else fresh(index, self.used | set(statement.indices))
            self._declare(binding[index], size)
        bound = tuple(binding[i] for i in statement.indices)
        view = self.view(Access(statement.name, bound), _Scope(tuple(self.fused.roots.values())))
        assert isinstance(view, Op)
        self.fused.roots[statement.name] = view

    def _reduced(self, index: str) -> bool:
        return any(isinstance(v, Op) and index in v.reduced for v in self.made.values())

    def _declare(self, index: str, size: int) -> None:
        self.used.add(index)
        self.fused.sizes.setdefault(index, size)
        self.fused.order.add(index)

    def view(self, access: Access, scope: _Scope) -> View:
        key = (access.tensor, access.indices)
        if key not in self.made:
            if len(self.made) >= MOST_VIEWS and len(self.producers) > 1:
                middle = list(self.producers)[(len(self.producers) - 1) // 2]
                raise NotFusible(middle, f"together they would compute {MOST_VIEWS:,} views, most of them again")
            producer = self.producers.get(access.tensor)
            made = self._leaf(access) if producer is None else self._inline(producer, access, scope)
            self.made[key] = made
            self.fused.views.append(made)
        return self.made[key]

    def _leaf(self, access: Access) -> Leaf:
        leaf = Leaf(access.tensor, access.indices, self.known[access.tensor])
        if leaf.declared.format is not None and not leaf.declared.free:
            for outer, inner in zip(leaf.stored, leaf.stored[1:], strict=False):
                self.fused.order.edge(outer, inner, str(access))
        return leaf

    def _inline(self, statement: Statement, access: Access, scope: _Scope) -> Op:
        binding = dict(zip(statement.indices, access.indices, strict=True))
        for index in statement.reduced:
            binding[index] = self._reduction(statement, index, binding, scope)
            self._declare(binding[index], self._size(statement, index))
        loops = scope.loops | set(binding.values())
        # Operands that reduce come last, so that they can share the views which their neighbours made.
        ranked = sorted(range(len(statement.operands)), key=lambda n: self._reduces(statement.operands[n].tensor))
        made: dict[int, View] = {}
        for n in ranked:
            one = statement.operands[n]
            bound = Access(one.tensor, tuple(binding[i] for i in one.indices))
            made[n] = self.view(bound, _Scope(scope.beside + tuple(made.values()), frozenset(loops), statement.group))
        operands = tuple(made[n] for n in range(len(made)))
        if statement.op == "add" and [v.fill for v in operands] == [0.0, -math.inf]:  # what is masked comes first
            operands = operands[::-1]
            statement = replace(statement, operands=statement.operands[::-1])
        fill, complete = fill_after(statement, [v.fill for v in operands])
        elements = math.prod(self.program.shapes[statement.name])
        if complete and elements > MOST:
            raise SparseError(
                f"{statement} ({statement.source or 'no source line'}) is not 0 where its operands are, and has "
                f"{elements:,} elements",
                "apply it to the stored values alone, or reduce first",
            )
        return Op(statement, access.indices, tuple(binding[i] for i in statement.reduced), operands, fill, complete)

    def _reduces(self, name: str) -> bool:
        producer = self.producers.get(name)
        return producer is not None and bool(producer.reduced)

    def _size(self, statement: Statement, index: str) -> int:
        for access in statement.operands:
            if index in access.indices:
                return self.program.shapes[access.tensor][access.indices.index(index)]
        raise KeyError(index)

    def _reduction(self, statement: Statement, index: str, binding: dict[str, str], scope: _Scope) -> str:
        """A fresh index, unless a view beside it has the same tensor with another index there and all else equal.

        The two then run over the same stream (a softmax's sum and quotient, the projections of one input). Where that
        index is a loop around the reduction, the reduction has to end before that loop begins (``conflict``); a
        tensor in memory is then read twice rather than tie the order, but for a softmax and the like.
        """
        if statement.name not in self.alone:
            kept = [binding[i] for i in statement.indices]
            views = below(scope.beside)
            for access in self._reads(statement, index):
                for view in views:
                    other = _matched(view, access, index, binding)
                    if other is None:
                        continue
                    if other not in scope.loops:
                        return other
                    tied = isinstance(view, Leaf) and scope.group != statement.group
                    tied |= not set(kept) <= set(view.indices)  # a product with something else: no sum over a row
                    if not tied and not any(self.fused.order.reaches(other, k) for k in kept):
                        for k in kept:
                            self.fused.order.edge(k, other, statement.name)
                        return other
        return fresh(index, self.used)

    def _reads(self, statement: Statement, index: str) -> list[Access]:
        """What a statement reads along an index, and what that is made of in turn, in the statement's index names."""
        found = dict.fromkeys(access for access in statement.operands if index in access.indices)
        todo = list(found)
        for access in todo:
            producer = self.producers.get(access.tensor)
            if producer is None:
                continue
            names = dict(zip(producer.indices, access.indices, strict=True))
            for one in producer.operands:
                deeper = Access(one.tensor, tuple(names.get(i, "") for i in one.indices))
                if index in deeper.indices and deeper not in found:
                    found[deeper] = None
                    todo.append(deeper)
        return list(found)

    def conflict(self) -> list[str]:
        """Order every reduction that shares an index with a loop around it; the statements to leave alone if no
        order can."""
        # By view and loop around it: what has to come before the loop so that the view ends outside; one a path.
        around: dict[View, dict[str, set[tuple[str, ...]]]] = {view: {} for view in self.fused.views}
        for view in reversed(self.fused.views):
            if not isinstance(view, Op):
                continue
            for r in view.reduced:
                for kept in around[view].get(r, ()):
                    self.fused.order.fixed.add(view.name)
                    for k in kept:
                        self.fused.order.edge(k, r, view.name)
            for one in view.operands:
                for loop in {*view.indices, *view.reduced, *around[view]} - set(one.indices):
                    own = loop in view.indices or loop in view.reduced
                    paths = {one.indices} if own else {min(p, one.indices, key=len) for p in around[view][loop]}
                    around[one].setdefault(loop, set()).update(paths)
        fixed = self.fused.order.fixed
        held = {e: tuple(o for o in owners if o in fixed) for e, owners in self.fused.order.edges.items()}
        order = PartialOrder(list(self.fused.order.indices), {e: owners for e, owners in held.items() if owners})
        cycle = order.cycle()
        owners = {o for edge in zip(cycle, cycle[1:] + cycle[:1], strict=True) for o in order.edges[edge]}
        return [s for s in self.producers if s in owners - self.alone][:1] or (list(self.producers) if cycle else [])


def _matched(view: View, access: Access, index: str, binding: dict[str, str]) -> str | None:
    """The index that a view has where an access has ``index``, if they agree in everything else."""
    name = view.tensor if isinstance(view, Leaf) else view.name
    if name != access.tensor or access.indices.count(index) != 1:
        return None
    at = access.indices.index(index)
    other = view.indices[at]
    same = all(binding.get(i) == view.indices[n] for n, i in enumerate(access.indices) if n != at)
    return other if same and other not in binding.values() else None


def below(views: Sequence[View]) -> list[View]:
    """The views and everything they are made of, each once."""
    found: dict[View, None] = {}
    stack = list(views)
    while stack:
        view = stack.pop()
        if view not in found:
            found[view] = None
            stack.extend(view.operands if isinstance(view, Op) else ())
    return list(found)


def _in_order(roots: Iterable[View]) -> list[View]:
    """Every view once, operands before their users, left before right."""
    found: dict[View, None] = {}
    stack: list[tuple[View, bool]] = [(root, False) for root in reversed(list(roots))]
    while stack:
        view, done = stack.pop()
        if view in found:
            continue
        if done or isinstance(view, Leaf):
            found[view] = None
        else:
            stack.append((view, True))
            stack.extend((v, False) for v in reversed(view.operands))
    return list(found)


def fuse(
    program: EinsumProgram, statements: Sequence[Statement], outputs: Sequence[str], known: Mapping[str, Declared]
) -> Fused:
    """Algorithm 1 on the statements of one region.

    Args:
        outputs: results of ``statements`` that are written to memory.
        known: what the region reads from memory.

    Raises:
        NotFusible: statements that would compute too much again.
        SparseError: an operator that has no meaning for what its operand does not store.
    """
    alone: set[str] = set()
    while True:
        fuser = _Fuser(program, statements, known, alone)
        for statement in reversed(statements):
            if statement.name in outputs:
                fuser.root(statement)
        fuser.fused.roots = {name: fuser.fused.roots[name] for name in outputs}
        fuser.fused.views = _in_order(fuser.fused.roots.values())
        tied = fuser.conflict()
        if not tied:
            break
        alone.update(tied)
    fused = fuser.fused
    met = [i for view in fused.views if isinstance(view, Leaf) for i in view.stored]
    fused.order.indices = list(dict.fromkeys((*met, *fused.order.indices)))
    return fused
