"""Regions in their surroundings: what Inductor would fuse over a region's borders.

A region is timed against Inductor on its own operators. In the whole graph Inductor also fuses the first and the last
of those with their neighbours, as a residual's addition with the norm behind it. ``surrounded`` is the part of a graph
in which that can be seen: the region, and all that Inductor makes one kernel with operators of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from tilestream.graph.region import extract
from tilestream.graph.rewrites.epilogues import with_relu
from tilestream.plan.fusion import units
from tilestream.plan.values import Readers, producer, reads, results


@dataclass(frozen=True)
class Surroundings:
    """A region with its neighbours, as a graph of its own; ``beside`` are the neighbours, in graph order."""

    graph: fx.GraphModule
    beside: tuple[fx.Node, ...]


def surrounded(owner: fx.GraphModule, regions: Mapping[str, Sequence[fx.Node]]) -> dict[str, Surroundings]:
    """The surroundings of each region that has some; of others what they take alone is what they take.

    Args:
        owner: a functional ATen graph without calls of regions.
        regions: the operators of each region, by its name.
    """
    nodes = list(owner.graph.nodes)
    inside = {node: name for name, members in regions.items() for node in members}
    beside: dict[str, set[fx.Node]] = {}
    for unit in units(nodes, with_relu(nodes)):
        for name in {inside[n] for n in unit.nodes if n in inside}:
            beside.setdefault(name, set()).update(n for n in unit.nodes if inside.get(n) != name)
    readers = Readers(nodes)
    found = {}
    for name, others in beside.items():
        if others:
            members = [n for n in nodes if n in others or inside.get(n) == name]
            found[name] = Surroundings(_alone(owner, members, readers), tuple(n for n in members if n in others))
    return found


def _alone(owner: fx.GraphModule, members: Sequence[fx.Node], readers: Readers) -> fx.GraphModule:
    """``members`` with the views between them, as a graph that is given what others make and returns what they read."""
    own = set(members)
    held = {read.node for node in members for read in reads(node)}
    given = [n for n in held if (made := producer(n)) is not None and made not in own]
    made = [h for node in members for h, _ in results(node)]
    outputs = [h for h in made if not readers[h] or not readers[h] <= own]
    return extract(owner, outputs, given)[0]
