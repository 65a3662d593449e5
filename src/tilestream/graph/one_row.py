"""Layers of one row that changes states: as few launches as products that wait for each other.

A launch has whole rows in front of its products, norms and what is elementwise, and behind them what is elementwise in
columns of their results, of several products at once. So a value that needs all of a row, a norm or another product,
is a launch later than what makes that row; all else is as early as what it is made of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import fx

from tilestream.graph.facts import Facts
from tilestream.graph.nodes import is_gather, is_product, value
from tilestream.graph.rewrites.states import WRITE_STATES
from tilestream.ir.tileops import OPS

WHOLE = ("norm", "reduce", "layout")
"""Families of ops that need more of a row than one column."""


def one_row_layers(nodes: Sequence[fx.Node], facts: Facts, taken: Collection[fx.Node]) -> Iterator[list[list[fx.Node]]]:
    """The launches of a graph that writes states, in order, each with a product; none of other graphs.

    Args:
        facts, taken: as ``few_rows.wide_blocks`` has them.
    """
    if not any(n.target is WRITE_STATES for n in nodes):
        return
    own = {n for n in nodes if n not in taken and facts.rows(n) == 1 and not is_gather(n)}
    turns = _Turns(own, facts)
    for node in nodes:
        turns.place(node)
    turns.place_free(nodes)
    for turn in sorted({*turns.at.values()} - {0}):
        group = [n for n in nodes if n in own and turns.at[n] == turn]
        if any(map(is_product, group)):
            yield [group]


class _Turns:
    """In which launch each node is computed: 0 where it is made of arguments alone. Of a node that is not ``own``, the
    launch behind which it can be."""

    def __init__(self, own: Collection[fx.Node], facts: Facts) -> None:
        self.own, self.facts = own, facts
        self.at: dict[fx.Node, int] = {}
        self.behind: set[fx.Node] = set()
        self.lengths: dict[int, int] = {}

    def place(self, node: fx.Node) -> None:
        """Place a node behind all that it reads."""
        whole = node not in self.own or is_product(node) or self._is_whole(node)
        turn = max((self._ready(n, whole) for n in node.all_input_nodes), default=0)
        if node not in self.own:
            self.at[node] = max((self.at.get(n, 0) for n in node.all_input_nodes), default=0)
            return
        if is_product(node):
            turn, length = max(turn, 1), self._length(node)
            while self.lengths.setdefault(turn, length) != length:
                turn += 1
        if turn and (
            is_product(node) or any(self.at.get(n) == turn and n in self.behind for n in node.all_input_nodes)
        ):
            self.behind.add(node)
        self.at[node] = turn

    def place_free(self, nodes: Sequence[fx.Node]) -> None:
        """What is made of arguments alone is computed where it is read first."""
        for node in reversed(nodes):
            if node in self.own and not self.at[node]:
                self.at[node] = min((t for u in node.users if u in self.own and (t := self.at[u])), default=0)

    def _ready(self, node: fx.Node, whole: bool) -> int:
        """The first launch that has a value, or the ``whole`` row of it."""
        turn = self.at.get(node, 0)
        later = node not in self.own or (whole and node in self.behind)
        return turn + 1 if turn and later else turn

    def _is_whole(self, node: fx.Node) -> bool:
        return any(OPS[kind].family in WHOLE for kind in self.facts.kinds[node])

    def _length(self, product: fx.Node) -> int:
        (read,) = self.facts.tiles[product]
        fake = value(read)
        assert fake is not None
        return int(fake.shape[-1])
