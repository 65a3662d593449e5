"""Which operators around ``tilestream::segment_reduce`` become one region: what makes edges' values, and what follows.

From each reduction a region grows backwards through operators of edges, as far as gathers, and forwards through
operators of nodes that nobody else reads before. Several reductions are one region where they read the same edges, or
one reads the other at the receivers of the edges, as a softmax does. What a product reads or makes stays with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import sympy
import torch
from torch import fx

from tilestream.graph.convexity import Groups, successors
from tilestream.graph.nodes import aten, behind, is_gather, is_product, is_view, packet, value
from tilestream.graph.operators.rules import REDUCTIONS, SHAPES
from tilestream.graph.ragged.lists import Edges, Gather, gather_of, sorted_lists
from tilestream.graph.ragged.rules import POINTWISE
from tilestream.graph.rewrites.operators import SEGMENT_REDUCE
from tilestream.graph.sizes import expression
from tilestream.graph.sums import CONSTANTS, first_alike
from tilestream.ir.dtypes import DTYPES
from tilestream.ir.ways import reached

FILLS = {*CONSTANTS, aten.full, aten.full_like, aten.new_full}


@dataclass(frozen=True)
class Grown:
    """A region.

    Attributes:
        members: in graph order. A gather is one where nobody else reads it.
        of_edges: those of them that have a value for each edge, not for each node.
        inside: those that take a node's own value at the receivers of its edges.
        same: of each integer tensor of the graph the first that is computed alike.
    """

    edges: Edges
    members: tuple[fx.Node, ...]
    of_edges: frozenset[fx.Node]
    inside: Mapping[fx.Node, Gather]
    same: Mapping[fx.Node, fx.Node]

    def gather(self, node: object) -> Gather | None:
        """What a node gathers for each edge from outside of the region."""
        if not isinstance(node, fx.Node) or node in self.inside or (fake := value(node)) is None or not fake.dim():
            return None
        return gather_of(node, self.same) if expression(fake.shape[0]) == self.edges.edges else None


def grow(graph: fx.Graph, refused: Mapping[fx.Node, str]) -> list[Grown]:
    """The ragged regions of a graph in its normal form; ``refused`` are no members."""
    same = first_alike(graph)
    _by_first_index(graph, same)
    nodes = [n for n in graph.nodes if n.op == "call_function"]
    after = successors(nodes)
    taken: set[fx.Node] = set()
    found: list[Grown] = []
    for edges in sorted_lists(graph, same):
        for grown in _List(edges, same, nodes, refused).regions(after, found):
            if taken.isdisjoint(grown.members):
                taken.update(grown.members)
                found.append(grown)
    return found


def _by_first_index(graph: fx.Graph, same: Mapping[fx.Node, fx.Node]) -> None:
    """Let gathers by equal indices read one node: models take the same part of an index tensor in every layer."""
    for node in graph.nodes:
        for operand in node.all_input_nodes if is_gather(node) else ():
            if (first := same.get(operand, operand)) is not operand:
                node.replace_input_with(operand, first)


@dataclass
class _List:
    """What can be in regions of one sorted list of edges."""

    edges: Edges
    same: Mapping[fx.Node, fx.Node]
    nodes: Sequence[fx.Node]
    refused: Mapping[fx.Node, str]
    of_edges: dict[fx.Node, bool] = field(default_factory=dict)
    of_nodes: dict[fx.Node, bool] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.seeds = [n for n in self.nodes if self.is_seed(n)]

    def is_seed(self, node: fx.Node) -> bool:
        by = node.args[2:4] == (self.edges.order, self.edges.starts)
        return node.target is SEGMENT_REDUCE and by and node not in self.refused

    def regions(self, after: Mapping[fx.Node, list[fx.Node]], before: Sequence[Grown]) -> Iterator[Grown]:
        """Regions that stay convex, also beside those ``before``."""
        for seed in self.seeds:
            self.takes_edge(seed.args[1])
        inside = [n for n in self.nodes if self.of_edges.get(n) or self.of_nodes.get(n) or self.is_seed(n)]
        forward = {n for n in self.nodes if n not in inside and self._may_follow(n)}
        parameters = {n: frozenset(self._tables(n)) for n in (*inside, *forward)}
        others = {n: frozenset() for grown in before for n in grown.members}
        groups = Groups(after, others | parameters)
        groups.hold(grown.members for grown in before)
        members = set(inside)
        for node in inside:
            for operand in node.all_input_nodes:
                if operand in members:
                    groups.merge(operand, node)
        for readers in self._shared(inside).values():
            for node in readers[1:]:
                groups.merge(readers[0], node)
        for seed in self.seeds:
            self._beside(seed, seed.args[1], groups, members, forward)
        self._follow(groups, members, forward)
        for group in groups.all():
            own = [n for n in group if n in members]
            if any(self.is_seed(n) for n in own) and self._worth(own):
                whole = self._with_gathers(own)
                rows = {n: found for n in own if (found := gather_of(n, self.same)) is not None}
                of_edges = frozenset(n for n in whole if self.of_edges.get(n) or self.gather(n) is not None)
                yield Grown(self.edges, whole, of_edges, rows, self.same)

    # -- edges ----------------------------------------------------------------------------------

    def takes_edge(self, node: object) -> bool:
        """Whether an operand of edges may be computed inside, with all that it is made of; gathers always are."""
        if not isinstance(node, fx.Node) or not self._sized(node, self.edges.edges):
            return False
        if node not in self.of_edges:
            self.of_edges[node] = False
            self.of_edges[node] = node not in self.refused and self._edge(node)
        return self.of_edges[node]

    def _edge(self, node: fx.Node) -> bool:
        found = gather_of(node, self.same)
        if found is not None:  # of a node's own value, at the receivers of the edges
            return found.index is self.edges.index and self.takes_node(found.table)
        kind, rank = packet(node), node.meta["val"].dim()
        if kind in FILLS:
            return rank == 1
        if kind not in POINTWISE and kind not in SHAPES and kind not in REDUCTIONS:
            return False
        read = [n for n in node.all_input_nodes if self._sized(n, self.edges.edges)]
        if kind in POINTWISE:
            read = [n for n in read if n.meta["val"].dim() == rank]
        if not read or (kind in SHAPES and read[0] is not node.args[0]):
            return False
        for operand in read:  # all are asked
            self.takes_edge(operand)
        by_index = any(self.gather(n) is not None or self._by_index(n) for n in read)
        if not by_index and any(self._of_product(n) for n in read):
            return False
        return not self._feeds_product(node)

    def _by_index(self, node: fx.Node) -> bool:
        """Whether rows that were taken through an index are in a member's value."""

        def takes(n: fx.Node) -> bool:
            return (gather_of(n, self.same) if self.of_edges.get(n) else self.gather(n)) is not None

        made_of = reached([node], lambda n: n.all_input_nodes if self.of_edges.get(n) and not takes(n) else ())
        return bool(self.of_edges.get(node)) and any(map(takes, made_of))

    def gather(self, node: object) -> Gather | None:
        """What a node gathers for each edge from what is no value of the region."""
        if not isinstance(node, fx.Node) or self.of_edges.get(node) or not self._sized(node, self.edges.edges):
            return None
        return gather_of(node, self.same)

    def _of_product(self, node: fx.Node) -> bool:
        def made_of(n: fx.Node) -> list[fx.Node]:
            if is_view(n) or (self.of_edges.get(n) is False and packet(n) in POINTWISE):
                return n.all_input_nodes[:1]
            inside = n.all_input_nodes if self.of_edges.get(n) else ()
            return [before for before in inside if self._sized(before, self.edges.edges)]

        return any(is_product(n) and not self.of_edges.get(n) for n in reached([node], made_of))

    def _feeds_product(self, node: fx.Node) -> bool:
        """Whether a product reads it, through operators that could be in its kernel."""

        def passes_on(n: fx.Node) -> bool:
            return self._sized(n, self.edges.edges) and packet(n) in (*POINTWISE, *SHAPES, aten.cat)

        return any(map(is_product, reached(node.users, lambda n: n.users if passes_on(n) else ())))

    # -- nodes ----------------------------------------------------------------------------------

    def takes_node(self, node: object) -> bool:
        """Whether a value of nodes is made of what the region sums up, by operators that can be inside."""
        if not isinstance(node, fx.Node) or node in self.refused or not self._sized(node, self.edges.nodes):
            return False
        if node not in self.of_nodes:
            self.of_nodes[node] = False
            self.of_nodes[node] = self._node(node)
        return self.of_nodes[node]

    def _node(self, node: fx.Node) -> bool:
        if self.is_seed(node):
            self.takes_edge(node.args[1])
            return True
        if packet(node) not in POINTWISE and packet(node) not in SHAPES:
            return False
        made_of = [self.takes_node(n) for n in node.all_input_nodes]  # all are asked
        return any(made_of)

    def _may_follow(self, node: fx.Node) -> bool:
        if node in self.refused:
            return False
        if (found := gather_of(node, self.same)) is not None:  # a node's value, at the receivers of its edges
            own = found.index is self.edges.index and self._sized(found.table, self.edges.nodes)
            return own and self._sized(node, self.edges.edges)
        fits = packet(node) in POINTWISE or packet(node) in SHAPES
        return fits and any(self._sized(node, size) for size in (self.edges.nodes, self.edges.edges))

    def _follow(self, groups: Groups[fx.Node], members: set[fx.Node], forward: set[fx.Node]) -> None:
        """Let operators join what they read, where nobody else outside reads it."""
        for node in self.nodes:
            joining = [u for u in node.users if u not in members] if node in members else []
            if len(joining) != 1 or not self._joins(joining[0], node, forward):
                continue
            (user,) = joining
            if groups.merge(node, user):
                members.add(user)
                of_edges = bool(self.of_edges.get(node)) or is_gather(user)
                if of_edges:
                    self.of_edges[user] = True
                    for operand in user.all_input_nodes:
                        if operand in members:
                            groups.merge(operand, user)
                else:
                    self._beside(user, node, groups, members, forward)

    def _beside(self, user: fx.Node, node: object, groups: Groups[fx.Node], members: set, forward: set) -> None:
        """What is made for ``user`` alone joins it, with what that is made of: a scaled row of the node itself."""
        for other in user.all_input_nodes:
            if other is node or other in members or other not in forward or len(other.users) > 1:
                continue
            if packet(other) in POINTWISE and not self._of_one_product(other) and groups.merge(other, user):
                members.add(other)
                self._beside(other, node, groups, members, forward)

    def _joins(self, user: fx.Node, node: fx.Node, forward: set[fx.Node]) -> bool:
        if user not in forward or any(self._of_one_product(n) for n in user.all_input_nodes if n is not node):
            return False
        if is_gather(user) or self.of_edges.get(node):
            behind = [u for u in user.users if u.op == "call_function"]
            if self._feeds_product(user) or not self._sized(user, self.edges.edges):
                return False
            return not is_gather(user) or bool(behind) and all(u in forward and not is_gather(u) for u in behind)
        if packet(user) in SHAPES:  # at the border it costs nothing
            return bool(user.users) and all(self._joins(u, user, forward) for u in user.users)
        return True

    def _of_one_product(self, node: fx.Node) -> bool:
        """Whether it is made by a product for this one reader, whose epilogue the reader can be."""
        while len(node.users) == 1 and (is_view(node) or packet(node) in POINTWISE) and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return len(node.users) == 1 and is_product(node)

    # -- both -----------------------------------------------------------------------------------

    def _sized(self, node: fx.Node, size: sympy.Expr) -> bool:
        fake = value(node)
        if fake is None or not fake.dim() or (fake.dtype not in DTYPES and fake.dtype is not torch.bool):
            return False
        return expression(fake.shape[0]) == size and fake.device == self.edges.starts.meta["val"].device

    def _tables(self, node: fx.Node) -> Iterator[fx.Node]:
        """Whole tables that a member reads rows of."""
        for operand in node.all_input_nodes:
            found = self.gather(behind(operand, lambda n: is_view(n) and not self.of_edges.get(n)))
            if found is not None and found.index is not self.edges.index:
                yield found.table

    def _shared(self, inside: Sequence[fx.Node]) -> dict[Gather | fx.Node, list[fx.Node]]:
        """Who reads the same rows, gathered or made outside."""
        found: dict[Gather | fx.Node, list[fx.Node]] = {}
        for node in inside:
            for operand in node.all_input_nodes:
                rows = self.gather(operand) or operand
                if self._sized(operand, self.edges.edges) and not self.of_edges.get(operand):
                    found.setdefault(rows, []).append(node)
        return found

    def _worth(self, group: Sequence[fx.Node]) -> bool:
        """Whether there is more than one reduction of rows that lie in memory."""
        rest = [n for n in group if not self.is_seed(n) and not is_view(n) and packet(n) not in FILLS]
        several = sum(map(self.is_seed, group)) > 1
        return several or bool(rest) or any(self.gather(x) for n in group for x in n.all_input_nodes)

    def _with_gathers(self, group: Sequence[fx.Node]) -> tuple[fx.Node, ...]:
        """With the gathers that nobody else reads."""
        whole = set(group)
        for node in reversed(self.nodes):
            if node not in whole and self.gather(node) and node.users and node.users.keys() <= whole:
                whole.add(node)
        return tuple(n for n in self.nodes if n in whole)
