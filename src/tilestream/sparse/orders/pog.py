"""The partial-order graph over index variables, and the total orders that it admits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

MAX_ORDERS = 20
"""How many orders are listed unless a caller says otherwise: what the released compiler stops at."""


@dataclass
class PartialOrder:
    """Index variables and edges (outer, inner), each with those who ask for it: views of tensors, or statements."""

    indices: list[str] = field(default_factory=list)
    edges: dict[tuple[str, str], tuple[str, ...]] = field(default_factory=dict)
    fixed: set[str] = field(default_factory=set)
    """Owners whose edges no copy can take away: statements that share an index with a loop inside theirs."""

    def add(self, index: str) -> None:
        if index not in self.indices:
            self.indices.append(index)

    def edge(self, outer: str, inner: str, owner: str) -> None:
        self.add(outer)
        self.add(inner)
        owners = self.edges.get((outer, inner), ())
        self.edges[outer, inner] = owners if owner in owners else (*owners, owner)

    def reaches(self, start: str, end: str) -> bool:
        """Whether ``end`` is ``start`` or must be inside it."""
        seen, stack = set(), [start]
        while stack:
            at = stack.pop()
            if at == end:
                return True
            if at not in seen:
                seen.add(at)
                stack.extend(inner for outer, inner in self.edges if outer == at)
        return False

    def cycle(self) -> list[str]:
        """Indices of one cycle, or nothing."""
        for outer, inner in self.edges:
            if self.reaches(inner, outer):
                return self._path(inner, outer)
        return []

    def _path(self, start: str, end: str) -> list[str]:
        before: dict[str, str] = {start: ""}
        queue = [start]
        for at in queue:
            for outer, inner in self.edges:
                if outer == at and inner not in before:
                    before[inner] = at
                    queue.append(inner)
        path = [end]
        while path[-1] != start:
            path.append(before[path[-1]])
        return path[::-1]

    def without(self, owner: str) -> PartialOrder:
        """A copy without what ``owner`` asks for."""
        kept = {e: tuple(o for o in owners if o != owner) for e, owners in self.edges.items()}
        return PartialOrder(list(self.indices), {e: owners for e, owners in kept.items() if owners}, self.fixed)

    def broken(self, order: tuple[str, ...]) -> str:
        """The first fixed edge that an order does not keep, in words; nothing if it keeps all."""
        rank = {index: n for n, index in enumerate(order)}
        for (outer, inner), owners in self.edges.items():
            if rank[outer] > rank[inner] and (held := [o for o in owners if o in self.fixed]):
                return f"{held[0]} reduces {inner} inside {outer}"
        return ""

    def admits(self, order: tuple[str, ...]) -> bool:
        """Whether an order keeps every edge."""
        rank = {index: n for n, index in enumerate(order)}
        return all(rank[outer] < rank[inner] for outer, inner in self.edges)

    def count(self) -> int:
        """How many topological orders there are, without listing them; 0 if there is a cycle.

        Sums over sets of indices that can come first: at most ``2 ** n`` of them, far fewer where edges bind.
        """
        before = {i: frozenset(o for o, inner in self.edges if inner == i) for i in self.indices}
        ways: dict[frozenset[str], int] = {frozenset(): 1}
        for _ in self.indices:
            longer: dict[frozenset[str], int] = {}
            for done, n in ways.items():
                for index in self.indices:
                    if index not in done and before[index] <= done:
                        longer[done | {index}] = longer.get(done | {index}, 0) + n
            ways = longer
        return sum(ways.values())

    def orders(self, cap: int = MAX_ORDERS) -> Iterator[tuple[str, ...]]:
        """Topological orders, at most ``cap``, in the order in which indices were added; none if there is a cycle."""
        below: dict[str, set[str]] = {i: set() for i in self.indices}
        waits = dict.fromkeys(self.indices, 0)
        for outer, inner in self.edges:
            below[outer].add(inner)
            waits[inner] += 1
        done: list[str] = []
        placed: set[str] = set()
        choices = [iter(self.indices)]  # by how many are placed: those that may still come next
        while choices and cap > 0:
            if len(done) == len(self.indices):
                cap -= 1
                yield tuple(done)
                index = None
            else:
                index = next((i for i in choices[-1] if waits[i] == 0 and i not in placed), None)
            if index is not None:
                done.append(index)
                placed.add(index)
                choices.append(iter(self.indices))
            else:
                choices.pop()
                if done:
                    index = done.pop()
                    placed.remove(index)
            if index is not None:
                for inner in below[index]:
                    waits[inner] += -1 if index in placed else 1

    def __str__(self) -> str:
        return "\n".join(f"{outer} -> {inner}: {', '.join(owners)}" for (outer, inner), owners in self.edges.items())
