"""Layers of one row that changes states: as few launches as products that wait for each other.

A launch has whole rows in front of its products, norms and what is elementwise, and behind them what is elementwise in
columns of their results, of several products at once. So a value that needs all of a row, a norm or another product,
is a launch later than what makes that row; all else is as early as what it is made of.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import fx

from tilestream.graph.facts import Facts
from tilestream.graph.nodes import is_gather, is_product, tensor_of
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
    places = _places(nodes, own, facts)
    for turn in sorted({places[n] // 2 for n in own} - {0}):
        group = [n for n in nodes if n in own and places[n] // 2 == turn]
        if any(map(is_product, group)):
            yield [group]


def _places(nodes: Sequence[fx.Node], own: Collection[fx.Node], facts: Facts) -> dict[fx.Node, int]:
    """Where each node is computed: 2 n in front of the products of launch n, 2 n + 1 behind them, 0 where it is made of
    arguments alone and nobody reads it. Of a node that is not ``own``, the first place that can read it."""
    places: dict[fx.Node, int] = {}
    lengths: dict[int, int] = {}
    for node in nodes:
        read = [n for n in node.all_input_nodes if places.get(n)]
        if node not in own:
            places[node] = max((places[n] // 2 * 2 + 2 if n in own else places[n] for n in read), default=0)
            continue
        whole = is_product(node) or any(OPS[kind].family in WHOLE for kind in facts.kinds[node])
        place = max((places[n] + (places[n] % 2 if whole else 0) for n in read), default=0)
        if is_product(node):
            length, place = tensor_of(*facts.tiles[node]).shape[-1], max(place, 2)
            while lengths.setdefault(place, length) != length:
                place += 2
            place += 1
        places[node] = place
    for node in reversed(nodes):  # what is made of arguments alone is computed where it is read first
        if not places[node]:
            places[node] = min((places[u] for u in node.users if u in own and places[u]), default=0)
    return places
