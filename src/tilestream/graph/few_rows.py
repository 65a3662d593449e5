"""Feed-forward blocks on few rows, whose hidden layer is wider than a stage of a row stream holds."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import fx

from tilestream.graph.lowering import MAX_FEATURES, Value
from tilestream.graph.nodes import is_product, is_view
from tilestream.schedule.shared_tile import MOST_ROWS

WIDEST = 65_536
"""Columns of a layer that a shared tile may have: its CTAs divide them."""


def wide_blocks(
    nodes: Collection[fx.Node], known: Mapping[fx.Node, Value], tiles: Mapping[fx.Node, Collection[fx.Node]]
) -> Iterator[list[fx.Node]]:
    """Groups of ``nodes``, in their order: a product, what is computed elementwise in front of it, and the products
    of one input before that. Nobody else uses what lies between, so a group is convex.

    Args:
        known: what nodes are, layers of any width included; ``tiles``: their operands that have rows.
    """
    for last in nodes:
        rows = known[last].rows if last in known else None
        if rows is None or not is_product(last) or not rows.is_Integer or not 0 < int(rows) <= MOST_ROWS:
            continue
        members, firsts = _before(last, tiles)
        inputs = {_through_views(n, members, tiles) for n in firsts}
        closed = all(u in members for n in members if n is not last for u in n.users)
        wide = any(known[n].tile.features > MAX_FEATURES for n in members if n in known)
        if firsts and len(inputs) == 1 and None not in inputs and closed and wide:
            yield [n for n in nodes if n in members]


def _through_views(
    first: fx.Node, members: set[fx.Node], tiles: Mapping[fx.Node, Collection[fx.Node]]
) -> fx.Node | None:
    """What a product of the first layer reads, whose views join ``members``: so one input stays one."""
    node = first
    while node is first or (is_view(node) and node in tiles):
        if len(tiles[node]) != 1:
            return None
        (before,) = tiles[node]
        if is_view(before) and before in tiles and len(before.users) == 1:
            members.add(before)
        elif is_view(before) and before in tiles:
            return before
        node = before
    return node


def _before(last: fx.Node, tiles: Mapping[fx.Node, Collection[fx.Node]]) -> tuple[set[fx.Node], list[fx.Node]]:
    """``last`` and what it is made from, back to the products before it; no products where it reaches an input."""
    members, firsts = {last}, []
    todo = list(tiles[last])
    while todo:
        node = todo.pop()
        if node in members:
            continue
        if node not in tiles:
            return members, []
        members.add(node)
        if is_product(node):
            firsts.append(node)
        else:
            todo += tiles[node]
            if not tiles[node]:
                return members, []
    return members, firsts
