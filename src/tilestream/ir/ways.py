"""Ways that tiles take through a pipeline: along its queues from stage to stage."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import TypeVar

from tilestream.ir.pipeline import Pipeline, Transport

N = TypeVar("N", bound=Hashable)


def after(p: Pipeline, *, on_chip: bool = False) -> dict[str, set[str]]:
    """The stages that take tiles from each; ``on_chip``: not by way of DRAM."""
    found: dict[str, set[str]] = defaultdict(set)
    for q in p.queues:
        if not (on_chip and q.transport is Transport.DRAM):
            found[q.producer] |= set(q.consumers)
    return found


def between(p: Pipeline, start: str, end: str) -> set[str]:
    """Stages on a way from ``start`` to ``end``, these two apart."""
    following = after(p)
    return {s for s in behind(following, start) if end in behind(following, s)}


def beside(p: Pipeline, start: str, end: str) -> set[str]:
    """Stages on other ways to ``end``, of what is on its way to ``start`` or made there: tiles that come straight from
    ``start`` wait for them."""
    following = after(p)
    early = {s for s in following if start in behind(following, s)} | {start}
    late = {s for a in early for s in behind(following, a)} - early
    return {s for s in late if end in behind(following, s)}


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


def levels(p: Pipeline) -> dict[str, int]:
    """How many queues the longest way to each stage passes.

    Where ways from one stage meet again, what comes by the shorter one waits for as many steps as their levels are
    apart.
    """
    found = dict.fromkeys((s.name for s in p.stages), 0)
    for _ in p.stages:  # at most as many rounds as stages: the pipeline has no cycles
        before = dict(found)
        for q in p.queues:
            for consumer in q.consumers:
                found[consumer] = max(found[consumer], found[q.producer] + 1)
        if found == before:
            break
    return found


def heaviest(p: Pipeline, end: str, weight: Mapping[str, int]) -> int:
    """The most that stages on one way to ``end`` weigh together, of those that have a weight."""
    known: dict[str, int] = {}

    def behind(name: str) -> int:
        if name not in known:
            known[name] = max(
                (
                    weight[q.producer] + behind(q.producer)
                    for q in p.queues
                    if name in q.consumers and q.producer in weight
                ),
                default=0,
            )
        return known[name]

    return behind(end)
