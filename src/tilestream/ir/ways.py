"""Ways that tiles take through a pipeline: along its queues from stage to stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from graphlib import TopologicalSorter
from typing import TypeVar

from tilestream.ir.pipeline import Pipeline, Stage, Transport

N = TypeVar("N", bound=Hashable)


def after(p: Pipeline, *, on_chip: bool = False) -> dict[str, set[str]]:
    """The stages that take tiles from each; ``on_chip``: not by way of DRAM."""
    found: dict[str, set[str]] = defaultdict(set)
    for q in p.queues:
        if not (on_chip and q.transport is Transport.DRAM):
            found[q.producer] |= set(q.consumers)
    return found


def producers_first(p: Pipeline) -> list[Stage]:
    """Its stages, each behind those that it takes tiles from."""
    order = TopologicalSorter({s.name: [q.producer for q in p.queues if s.name in q.consumers] for s in p.stages})
    return [p.stage(name) for name in order.static_order()]


def between(p: Pipeline, start: str, end: str) -> set[str]:
    """Stages on a way from ``start`` to ``end``, these two apart."""
    following = after(p)
    return {s for s in behind(following, start) if end in behind(following, s)}


def behind(following: Mapping[str, set[str]], start: str) -> set[str]:
    """The stages behind ``start``, ``following`` being those that take tiles from each."""
    return reached(following.get(start, ()), lambda name: following.get(name, ()))


def reached(starts: Iterable[N], after: Callable[[N], Iterable[N]]) -> set[N]:
    """``starts``, and all that comes after them in a graph of any kind."""
    found: set[N] = set()
    todo = [*starts]
    while todo:
        one = todo.pop()
        if one not in found:
            found.add(one)
            todo += after(one)
    return found


def longest(p: Pipeline, start: str, end: str) -> int:
    """Queues on the longest way from ``start`` to ``end`` through on-chip queues; negative if there is none."""
    following = after(p, on_chip=True)
    known: dict[str, int] = {end: 0}

    def hops(name: str) -> int:
        if name not in known:
            known[name] = max((1 + hops(n) for n in following[name]), default=-len(p.stages) - 1)
        return known[name]

    return hops(start)
