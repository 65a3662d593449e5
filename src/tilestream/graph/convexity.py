"""Groups of nodes that stay convex: contracting every group to one node leaves the graph acyclic."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from typing import Generic, TypeVar

from torch import fx

from tilestream.errors import PlanError

N = TypeVar("N", bound=Hashable)


@dataclass(frozen=True, eq=False)
class _Group(Generic[N]):
    """Nodes, all that they use as whole operands, and the places of the first and the last of them."""

    nodes: frozenset[N]
    parameters: frozenset[N]
    first: int
    last: int

    def with_(self, other: _Group[N]) -> _Group[N]:
        first, last = min(self.first, other.first), max(self.last, other.last)
        return _Group(self.nodes | other.nodes, self.parameters | other.parameters, first, last)


class Groups(Generic[N]):
    """Disjoint sets of nodes, of fx or of any graph, merged only where the contracted graph stays acyclic.

    Args:
        after: all nodes in the graph's order, each with those that come after it.
        parameters: the nodes that may be grouped, each with the nodes that it uses as whole
            operands; those must come from outside its group, since a group sees its values row
            by row.
    """

    def __init__(self, after: Mapping[N, Sequence[N]], parameters: Mapping[N, frozenset[N]]) -> None:
        self._position = {n: i for i, n in enumerate(after)}
        self._group = {n: _Group(frozenset((n,)), own, *[self._position[n]] * 2) for n, own in parameters.items()}
        self._after = after
        # Of each position, the first position of all groups that end there or later: what a jump inside a group
        # leads back to from there. It never falls from one position to the next.
        self._back = list(range(len(after)))

    def position(self, node: N) -> int:
        """Place in the graph's order; nodes of other kinds (placeholders) come first."""
        return self._position.get(node, -1)

    def merge(self, a: N, b: N, force: bool = False) -> bool:
        """Merge the groups of two nodes if the result is legal; ``force`` for parts of one tuple."""
        left, right = self._group.get(a), self._group.get(b)
        if left is None or right is None:
            return False
        if left is right:
            return True
        both = left.with_(right)
        if not force and (not both.parameters.isdisjoint(both.nodes) or self._cyclic(both)):
            return False
        for node in both.nodes:
            self._group[node] = both
        self._note_span(both)
        return True

    def hold(self, units: Iterable[Sequence[N]]) -> None:
        """Make a group of each of ``units``, what runs at once."""
        for first, *others in units:
            for node in others:
                self.merge(first, node, force=True)

    def all(self) -> list[list[N]]:
        """Every group, its nodes in graph order; groups in the order of their first nodes."""
        unique = sorted({id(g): g for g in self._group.values()}.values(), key=lambda g: g.first)
        return [sorted(g.nodes, key=self._position.__getitem__) for g in unique]

    def _note_span(self, group: _Group[N]) -> None:
        place = group.last
        while place >= 0 and self._back[place] > group.first:
            self._back[place] = group.first
            place -= 1

    def _earliest(self, node: N) -> int:
        """No path from ``node``, through whole groups, leads to a position before this one."""
        place = self.position(node)
        while place >= 0 and self._back[place] < place:
            place = self._back[place]
        return place

    def _cyclic(self, both: _Group[N]) -> bool:
        inside = both.nodes
        seen: set[N] = set()
        queue = [s for n in inside for s in self._after[n] if s not in inside]
        while queue:
            node = queue.pop()
            if node in inside:
                return True
            if node in seen or self._earliest(node) > both.last:
                continue
            group = self._group.get(node)
            whole = (node,) if group is None else group.nodes
            seen.update(whole)
            queue.extend(s for n in whole for s in self._after.get(n, ()) if s not in seen)
        return False


def in_order(units: Sequence[Iterable[N]], before: Callable[[N], Iterable[N]]) -> list[int]:
    """The places of ``units`` so that producers come first; among those that can run, the one that was given first.

    Args:
        units: groups of nodes, each node in one.
        before: the nodes whose results a node reads; those outside of all units are there already.

    Raises:
        PlanError: two units wait for each other: one of them is not convex.
    """
    unit = {node: i for i, nodes in enumerate(units) for node in nodes}
    needs: dict[int, set[int]] = {i: set() for i in range(len(units))}
    for node, i in unit.items():
        needs[i].update(j for p in before(node) if (j := unit.get(p, i)) != i)
    sorter = TopologicalSorter(needs)
    try:
        sorter.prepare()
    except CycleError as cycle:
        stuck = next(iter(units[cycle.args[1][0]]))
        remedy = "cut it where a path leaves and comes back"
        raise PlanError(f"the group of {str(stuck)!r} waits for itself", remedy) from None
    ready: list[int] = []
    order: list[int] = []
    while sorter:
        for i in sorter.get_ready():
            heapq.heappush(ready, i)
        order.append(heapq.heappop(ready))
        sorter.done(order[-1])
    return order


def successors(nodes: Sequence[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """Users of every node; a node that mutates comes after everything before it in the graph."""
    after = {n: list(n.users) for n in nodes}
    for index, node in enumerate(nodes):
        schema = getattr(node.target, "_schema", None)
        if schema is not None and schema.is_mutable:
            for earlier in nodes[:index]:
                after[earlier].append(node)
            after[node] = list(nodes[index + 1 :])
    return after
