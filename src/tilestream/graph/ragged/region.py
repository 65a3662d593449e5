"""The ragged regions of a graph, lowered."""

from __future__ import annotations

import logging
from dataclasses import replace

import torch
from torch import fx

from tilestream.graph.nodes import Unsupported, aten
from tilestream.graph.ragged.growth import Grown, grow
from tilestream.graph.ragged.lists import Edges, Gather
from tilestream.graph.ragged.lowering import Ragged, Shapes
from tilestream.graph.region import EdgeArguments, Region, region_of, result_of
from tilestream.graph.rewrites.given_bounds import MOST_ROWS
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.operators import SORTED_INDEX
from tilestream.graph.selection import Cut
from tilestream.graph.signs import wraps
from tilestream.graph.sizes import expression, hint
from tilestream.graph.sums import first_alike
from tilestream.ir.axes import Level, Loop, Spread
from tilestream.ir.pipeline import Pipeline, Stage

log = logging.getLogger(__name__)

PREFIX = "ragged"
STEP = 8
"""Nodes, and edges of one, that a worker of the reference machine takes at once."""
CTAS = 264


def ragged_regions(owner: fx.GraphModule) -> tuple[list[Cut], dict[fx.Node, str]]:
    """The ragged regions of a graph in its normal form, and why operators that could have been in one are not.

    Indices that they read in sorted order become nodes of the graph, one for all that read it.
    """
    graph, refused = owner.graph, dict[fx.Node, str]()
    lists = SortedIndices(graph)
    while True:  # what cannot be lowered where it is leaves its region, and what is left grows anew
        cuts: list[Cut] = []
        leave: dict[fx.Node, str] = {}
        for grown in grow(graph, refused):
            try:
                cuts.append(_lowered(owner, grown, lists, f"{PREFIX}{len(cuts)}"))
            except Unsupported as reason:
                log.debug("%s leaves its ragged region: %s", reason.node, reason.reason)
                leave |= dict.fromkeys(
                    grown.members if reason.node not in grown.members else (reason.node,), reason.reason
                )
        if not leave:
            return cuts, refused
        refused |= leave


def _lowered(owner: fx.GraphModule, grown: Grown, lists: SortedIndices, title: str) -> Cut:
    """
    Raises:
        Unsupported: with the member that stands in the way.
    """
    members = frozenset(grown.members)
    e = Ragged(grown, lambda rows: lists.sorted(rows, grown.edges), Shapes(grown))
    for node in grown.members:
        try:
            e.emit(node)
        except Unsupported as reason:
            raise Unsupported(reason.reason, node) from reason
    outputs = [n for n in grown.members if any(u not in members for u in n.users)]
    results = {}
    for n, node in enumerate(outputs):
        try:
            e.store(node, f"y{n}", node in grown.of_edges)
        except Unsupported as reason:
            raise Unsupported(reason.reason, node) from reason
        results[node] = result_of(node, f"y{n}")
    if not e.inputs:
        raise Unsupported("it reads nothing of its edges: how many there are is in memory")
    e.bounds()
    mesh = (Spread(Level.GRID, CTAS, ("nodes",)),)
    stage = Stage("all", tuple(e.ops), (Loop("nodes", STEP), Loop("edges", STEP)), mesh)
    program = Pipeline("ragged", tuple(e.tensors.values()), (stage,), (), strategy="segments")
    indices = [lists.raw[b.node][0] for b in e.inputs if b.node in lists.raw]
    beside = [n for n in (grown.edges.order, grown.edges.index, *indices) if n is not None]
    rows = hint(grown.edges.starts.meta["val"].shape[0]) - 1
    region = region_of(owner, title, grown.members, results, program, e, rows, beside)
    return Cut(replace(region, edges=_arguments(region, grown, e, lists)), grown.members, tuple(outputs))


def _arguments(region: Region, grown: Grown, e: Ragged, lists: SortedIndices) -> EdgeArguments:
    at = {name: index for index, name in enumerate(region.arguments)}
    own = (grown.edges.order, grown.edges.starts, grown.edges.busy)
    order, starts, busy = (-1 if n is None else at[n.name] for n in own)
    receivers = -1 if grown.edges.index is None else at.get(grown.edges.index.name, -1)
    made = {b.node: lists.raw[b.node] for b in e.inputs if b.node in lists.raw}
    sources = tuple((at[raw.name], at[n.name], rows) for n, (raw, rows) in made.items())
    return EdgeArguments(order, starts, busy, receivers, sources)


class SortedIndices:
    """Indices of a graph in the order of edges, each made once, behind what it is made of.

    Attributes:
        raw: of each what it was made of, and how many rows it names.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        there = graph.find_nodes(op="call_function", target=SORTED_INDEX)
        self._made = {self._key(*n.args[:3]): n for n in there}
        self.raw: dict[fx.Node, tuple[fx.Node, int]] = {}

    def sorted(self, rows: Gather, edges: Edges) -> fx.Node:
        """``rows.index`` in the order of ``edges``, of which none is below zero.

        Where edges lie side by side, and none of who reads it counts rows from the last one, it is the index itself.
        """
        return self.of(rows.index, edges, rows.table.meta["val"].shape[0], rows.table)

    def of(self, index: fx.Node, edges: Edges, count: int | torch.SymInt, table: fx.Node | None = None) -> fx.Node:
        """``index``, which names ``count`` rows.

        Args:
            table: whose rows those are, which says how many there are where that is not known.

        Raises:
            Unsupported: nothing says how many.
        """
        key = self._key(index, edges.order, count)
        if key not in self._made:
            place = {node: n for n, node in enumerate(self._graph.nodes)}
            if not isinstance(count, int) and table is None:
                raise Unsupported("how many rows an index names is not known", index)
            needed = [n for n in (index, edges.order, None if isinstance(count, int) else table) if n is not None]
            last = max(needed, key=place.__getitem__)
            with self._graph.inserting_before(last.next):
                size = count if isinstance(count, int) else call(index, aten.sym_size.int, table, 0)
                wrap = wraps(index, first_alike(self._graph))
                if edges.order is None:
                    made = _from_first(index, size) if wrap else index
                else:
                    made = call(edges.order, SORTED_INDEX, index, edges.order, size, wrap)
                self._made[key] = made
        self.raw[self._made[key]] = (index, hint(count))
        return self._made[key]

    @staticmethod
    def _key(index: object, order: object, count: object) -> tuple[object, object, object]:
        size = count.meta["val"] if isinstance(count, fx.Node) else count
        return index, order, expression(size)  # pyright: ignore[reportArgumentType]


def _from_first(index: fx.Node, rows: object) -> fx.Node:
    """An index whose readers count rows from the last one below zero, as int32, by operators that Inductor fuses."""
    below = call(index, aten.lt.Scalar, index, 0)
    found = call(index, aten.where.self, below, call(index, aten.add.Tensor, index, rows), index)
    return call(index, aten._to_copy.default, call(index, aten.clamp.default, found, -1, MOST_ROWS), dtype=torch.int32)
