"""A region's last layers as a region of their own, for where its first ones are better left to a library."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from torch import fx

from tilestream.graph.modules import copied
from tilestream.graph.nodes import is_product
from tilestream.graph.region import Region
from tilestream.graph.selection import Cut, Partition, partition
from tilestream.ir.ways import reached

LIBRARY = "a library spreads this layer over more SMs than a row stream of so few rows has tiles"
LEAST_LAYERS = 2
"""Of a tail: a single product streams into nothing."""


@dataclass(frozen=True)
class Tail:
    """All but the first ``left`` layers of a region: ``part`` has them as its one region in ``graph``, a copy of the
    region's own."""

    left: int
    graph: fx.GraphModule
    part: Partition

    @property
    def region(self) -> Region:
        (cut,) = self.part.cuts
        return cut.region

    def within(self, owner: fx.Graph) -> Cut | None:
        """The tail in the graph that the region is of; None where a node is not to be found there."""
        (cut,) = self.part.cuts
        return cut.within(owner)


def tails(region: Region) -> Iterator[Tail]:
    """The longest and the shortest tail of a region of one layer behind another."""
    most = sum(map(is_product, region.graph.graph.nodes)) - LEAST_LAYERS
    for left in dict.fromkeys((1, most)) if most > 0 else ():
        graph = copied(region.graph)
        mine = [n for n in graph.graph.nodes if is_product(n)]
        before = _behind(mine[left])
        if before.intersection(mine) != {*mine[:left]}:
            return  # no chain
        found = partition(graph, apart=dict.fromkeys((n.name for n in before), LIBRARY))
        if len(found.cuts) == 1 and {*mine[left:]} <= {*found.cuts[0].nodes}:
            (cut,) = found.cuts
            yield Tail(left, graph, replace(found, cuts=(replace(cut, region=replace(cut.region, name=region.name)),)))


def _behind(node: fx.Node) -> set[fx.Node]:
    """The operators that a node's value comes from."""
    found = reached(node.all_input_nodes, lambda n: n.all_input_nodes)
    return {n for n in found if n.op == "call_function"}
