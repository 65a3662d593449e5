"""Cross-expression fusion: statements to trees of views with fresh reduction indices (FuseFlow, algorithm 1).

``fuse`` replaces every use of an earlier result by its producer, with the consumer's indices put in. Two uses with
the same indices are one view and computed once; others are views of their own.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from tilestream.sparse.einsum import Access, Declared, EinsumProgram, Statement, fresh, subscript
from tilestream.sparse.ops import fill_after
from tilestream.sparse.pog import PartialOrder


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

    ``complete``: its operand must store every coordinate (``ops.fill_after``). ``pre_fill``: what is not stored stands
    for this before the reduction.
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


class _Fuser:
    def __init__(self, program: EinsumProgram, statements: Sequence[Statement], known: Mapping[str, Declared]) -> None:
        self.program, self.known = program, known
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
        view = self.view(Access(statement.name, tuple(binding[i] for i in statement.indices)), ())
        assert isinstance(view, Op)
        self.fused.roots[statement.name] = view

    def _reduced(self, index: str) -> bool:
        return any(isinstance(v, Op) and index in v.reduced for v in self.made.values())

    def _declare(self, index: str, size: int) -> None:
        self.used.add(index)
        self.fused.sizes.setdefault(index, size)
        self.fused.order.add(index)

    def view(self, access: Access, siblings: tuple[View, ...]) -> View:
        key = (access.tensor, access.indices)
        if key not in self.made:
            producer = self.producers.get(access.tensor)
            made = self._leaf(access) if producer is None else self._inline(producer, access, siblings)
            self.made[key] = made
            self.fused.views.append(made)
        return self.made[key]

    def _leaf(self, access: Access) -> Leaf:
        leaf = Leaf(access.tensor, access.indices, self.known[access.tensor])
        if leaf.declared.format is not None and not leaf.declared.free:
            for outer, inner in zip(leaf.stored, leaf.stored[1:], strict=False):
                self.fused.order.edge(outer, inner, str(access))
        return leaf

    def _inline(self, statement: Statement, access: Access, siblings: tuple[View, ...]) -> Op:
        binding = dict(zip(statement.indices, access.indices, strict=True))
        for index in statement.reduced:
            binding[index] = self._reduction(statement, index, binding, siblings)
            self._declare(binding[index], self._size(statement, index))
        operands: tuple[View, ...] = ()
        # Operands that reduce come last, so that they can share the views which their neighbours made.
        ranked = sorted(range(len(statement.operands)), key=lambda n: self._reduces(statement.operands[n].tensor))
        made: dict[int, View] = {}
        for n in ranked:
            one = statement.operands[n]
            bound = Access(one.tensor, tuple(binding[i] for i in one.indices))
            made[n] = self.view(bound, siblings + tuple(made.values()))
        operands = tuple(made[n] for n in range(len(made)))
        fill, complete = fill_after(statement, [v.fill for v in operands])
        return Op(statement, access.indices, tuple(binding[i] for i in statement.reduced), operands, fill, complete)

    def _reduces(self, name: str) -> bool:
        producer = self.producers.get(name)
        return producer is not None and bool(producer.reduced)

    def _size(self, statement: Statement, index: str) -> int:
        for access in statement.operands:
            if index in access.indices:
                return self.program.shapes[access.tensor][access.indices.index(index)]
        raise KeyError(index)

    def _reduction(self, statement: Statement, index: str, binding: dict[str, str], siblings: tuple[View, ...]) -> str:
        """A fresh index, unless a view beside it has the operand with another index there and everything else equal.

        The two then run over the same stream (a softmax's sum and quotient). The reduction must end before the other
        view's loop begins, which the order says.
        """
        views = _below(siblings)
        for access in statement.operands:
            if index not in access.indices:
                continue
            at = access.indices.index(index)
            for view in views:
                name = view.tensor if isinstance(view, Leaf) else view.name
                if name != access.tensor or len(view.indices) != len(access.indices):
                    continue
                other = view.indices[at]
                rest = [(binding.get(i), view.indices[n]) for n, i in enumerate(access.indices) if n != at]
                if other in binding.values() or any(a != b for a, b in rest):
                    continue
                kept = [binding[i] for i in statement.indices]
                if not any(self.fused.order.reaches(other, k) for k in kept):
                    for k in kept:
                        self.fused.order.edge(k, other, statement.name)
                    self.fused.order.fixed.add(statement.name)
                    return other
        return fresh(index, self.used)


def _below(views: Sequence[View]) -> list[View]:
    """The views and everything they are made of, each once."""
    found: dict[int, View] = {}
    stack = list(views)
    while stack:
        view = stack.pop()
        if id(view) not in found:
            found[id(view)] = view
            stack.extend(view.operands if isinstance(view, Op) else ())
    return list(found.values())


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
        SparseError: an operator that has no meaning for what its operand does not store.
    """
    fuser = _Fuser(program, statements, known)
    for statement in reversed(statements):
        if statement.name in outputs:
            fuser.root(statement)
    fused = fuser.fused
    fused.roots = {name: fused.roots[name] for name in outputs}
    fused.views = _in_order(fused.roots.values())
    met = [i for view in fused.views if isinstance(view, Leaf) for i in view.stored]
    fused.order.indices = list(dict.fromkeys((*met, *fused.order.indices)))
    return fused
