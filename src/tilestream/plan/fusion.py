"""A graph as what runs one after another: pipelines where its regions stream, and kernels of what is left.

Inductor makes one kernel of operators that follow each other between products. A sum by atomics ends its kernel; rows
of what a reduction makes are looked up in another one, since it is computed row by row there. A group never waits for
itself: that is asked of groups as they are, so that two cannot wait for each other either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from tilestream.graph.convexity import in_order
from tilestream.graph.sums import first_alike
from tilestream.plan.indexed import by_atomics, looks_up
from tilestream.plan.library import alone, closes, reduces
from tilestream.plan.values import producer, reads, works

MOST_FUSED = 64
"""Operators of one of Inductor's kernels, its own limit."""


@dataclass(frozen=True)
class Unit:
    """Operators that run together. ``region`` names the region whose pipeline runs them; empty: one kernel."""

    nodes: tuple[fx.Node, ...]
    region: str = ""


def units(nodes: Sequence[fx.Node], streamed: Mapping[str, Sequence[fx.Node]]) -> list[Unit]:
    """The operators among ``nodes``, which are in graph order, in an order in which they can run.

    Args:
        streamed: the nodes of each region that runs as a pipeline.
    """
    inside = {node: name for name, members in streamed.items() for node in members}
    again = _made_before([n for n in nodes if n not in inside])
    working = [n for n in nodes if works(n) and n not in again]
    atoms: dict[fx.Node | str, list[fx.Node]] = {}
    for node in working:
        atoms.setdefault(inside.get(node, node), []).append(node)
    groups = _Groups()
    for key, members in _ordered(atoms):
        groups.add(members, key if isinstance(key, str) else "")
    made: dict[fx.Node | str, list[fx.Node]] = {}
    for number, members in enumerate(groups.members):
        if members:
            made[groups.regions[number] or members[0]] = members
    place = {node: i for i, node in enumerate(working)}
    return [
        Unit(tuple(sorted(members, key=place.__getitem__)), key if isinstance(key, str) else "")
        for key, members in _ordered(made)
    ]


def _made_before(nodes: Sequence[fx.Node]) -> set[fx.Node]:
    """Sums by an index that repeat one before them, as every layer counts a node's edges: they are made once."""
    if not any(map(by_atomics, nodes)):
        return set()
    same = first_alike(nodes[0].graph, floats=True)
    return {n for n in nodes if by_atomics(n) and same.get(n, n) is not n}


def before(node: fx.Node) -> list[fx.Node]:
    """The operators whose results ``node`` reads, each once."""
    made = (producer(read.node) for read in reads(node))
    return list(dict.fromkeys(p for p in made if p is not None))


def _ordered(groups: Mapping[fx.Node | str, list[fx.Node]]) -> list[tuple[fx.Node | str, list[fx.Node]]]:
    """Groups so that producers come first; among those that can run, the one that was given first."""
    keys = list(groups)
    return [(keys[i], groups[keys[i]]) for i in in_order(list(groups.values()), before)]


class _Groups:
    """Groups by number, each with the set of those that must run before it, as bits."""

    def __init__(self) -> None:
        self.members: list[list[fx.Node]] = []
        self.regions: list[str] = []
        self._open: list[bool] = []  # whether more operators may join
        self._before: list[int] = []
        self._of: dict[fx.Node, int] = {}

    def add(self, members: list[fx.Node], region: str) -> None:
        """Add an operator, to the groups before it that may take it, which become one; or a whole region."""
        own = set(members)
        needs = sorted({self._of[p] for n in members for p in before(n) if p not in own and p in self._of})
        joins = not region and not alone(members[0])
        own_rows = looks_up(members[0])
        for group in reversed(needs) if joins else ():
            others = [g for g in needs if g != group]
            room = self._open[group] and len(self.members[group]) < MOST_FUSED
            room = room and not (own_rows and any(map(reduces, self.members[group])))
            if room and not any(self._before[g] >> group & 1 for g in others):
                self._join(members[0], group, others)
                for other in others:
                    self._merge(group, other)
                self._open[group] = not closes(members[0])
                return
        number = len(self.members)
        self.members.append(list(members))
        self.regions.append(region)
        self._open.append(joins and not closes(members[0]))
        self._before.append(self._all_before(needs))
        self._of.update(dict.fromkeys(members, number))

    def _join(self, node: fx.Node, group: int, others: Sequence[int]) -> None:
        self.members[group].append(node)
        self._of[node] = group
        more = self._all_before(others)
        if more & ~self._before[group]:
            for number, known in enumerate(self._before):
                if number == group or known >> group & 1:
                    self._before[number] |= more

    def _merge(self, group: int, other: int) -> None:
        """Make ``other`` part of ``group``, unless a third lies between the two."""
        room = self._open[other] and len(self.members[group]) + len(self.members[other]) <= MOST_FUSED
        if not room or self._between(group, other) or self._between(other, group):
            return
        self._of.update(dict.fromkeys(self.members[other], group))
        self.members[group] += self.members[other]
        self.members[other] = []
        both = 1 << group | 1 << other
        whole = (self._before[group] | self._before[other]) & ~both
        for number, known in enumerate(self._before):
            if known & both:
                self._before[number] = known & ~both | 1 << group | whole
        self._before[group] = whole

    def _between(self, first: int, last: int) -> bool:
        """Whether some other group runs after ``first`` and before ``last``."""
        early = self._before[last]
        return any(early >> n & 1 and n != first and known >> first & 1 for n, known in enumerate(self._before))

    def _all_before(self, groups: Sequence[int]) -> int:
        found = 0
        for group in groups:
            found |= self._before[group] | 1 << group
        return found
