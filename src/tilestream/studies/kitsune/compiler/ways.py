"""What waits for what on the ways of tiles through a pipeline, where several of them meet again."""

from __future__ import annotations

from collections.abc import Mapping

from tilestream.ir.pipeline import Pipeline
from tilestream.ir.ways import after, behind


def beside(p: Pipeline, start: str, end: str) -> set[str]:
    """Stages on other ways to ``end``, of what is on its way to ``start`` or made there: tiles that come straight from
    ``start`` wait for them."""
    following = after(p)
    early = {s for s in following if start in behind(following, s)} | {start}
    late = {s for a in early for s in behind(following, a)} - early
    return {s for s in late if end in behind(following, s)}


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
