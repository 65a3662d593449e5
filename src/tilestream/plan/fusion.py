"""A graph as what runs one after another: pipelines where its regions stream, and kernels of what is left.

Inductor makes one kernel of operators that follow each other between products. A sum by atomics ends its kernel; rows
of what a reduction makes are looked up in another one, since it is computed row by row there. A group never waits for
itself: that is asked of groups as they are, so that two cannot wait for each other either.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from tilestream.graph.convexity import Groups, in_order
from tilestream.graph.sums import first_alike
from tilestream.plan.indexed import by_atomics, looks_up
from tilestream.plan.library import alone, reduces
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
    kernels = _Kernels(working, [members for key, members in atoms.items() if isinstance(key, str)])
    for key, members in _ordered(atoms):
        kernels.add(members, key if isinstance(key, str) else "")
    made: dict[fx.Node | str, list[fx.Node]] = {}
    for number, members in kernels.members.items():
        made[kernels.regions.get(number) or members[0]] = members
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


class _Kernels:
    """Operators that run together, by number; those of a region do from the start. What runs together stays convex."""

    def __init__(self, nodes: Sequence[fx.Node], regions: Sequence[Sequence[fx.Node]]) -> None:
        self.members: dict[int, list[fx.Node]] = {}
        self.regions: dict[int, str] = {}
        self._open: set[int] = set()  # those that more operators may join
        self._of: dict[fx.Node, int] = {}
        after: dict[fx.Node, list[fx.Node]] = {node: [] for node in nodes}
        for node in nodes:
            for read in before(node):
                after.get(read, []).append(node)
        self._groups = Groups(after, dict.fromkeys(nodes, frozenset()))
        self._groups.hold(regions)

    def add(self, members: list[fx.Node], region: str) -> None:
        """Add an operator, to the kernels before it that may take it, which become one; or a whole region."""
        first, own = members[0], set(members)
        needs = sorted({self._of[p] for n in members for p in before(n) if p not in own and p in self._of})
        joins = not region and not alone(first)
        for kernel in reversed(needs) if joins else ():
            room = kernel in self._open and len(self.members[kernel]) < MOST_FUSED
            room = room and not (looks_up(first) and any(map(reduces, self.members[kernel])))
            if room and self._groups.merge(self.members[kernel][0], first):
                self._put(kernel, members)
                for other in needs:
                    if other != kernel:
                        self._merge(kernel, other)
                self._settle(kernel, not by_atomics(first))
                return
        number = len(self._of)  # which rises
        self._put(number, members)
        if region:
            self.regions[number] = region
        self._settle(number, joins and not by_atomics(first))

    def _put(self, kernel: int, members: Sequence[fx.Node]) -> None:
        self.members.setdefault(kernel, []).extend(members)
        self._of.update(dict.fromkeys(members, kernel))

    def _settle(self, kernel: int, is_open: bool) -> None:
        """Say whether more operators may join a kernel: a sum by atomics is there when its kernel is over."""
        (self._open.add if is_open else self._open.discard)(kernel)

    def _merge(self, kernel: int, other: int) -> None:
        """Make ``other`` part of ``kernel``, unless a third lies between the two."""
        room = other in self._open and len(self.members[kernel]) + len(self.members[other]) <= MOST_FUSED
        if room and self._groups.merge(self.members[kernel][0], self.members[other][0]):
            self._put(kernel, self.members.pop(other))
