"""Feed-forward blocks whose hidden layer is wider than a stage of a row stream holds: a kernel of their own has them,
on few rows one tile that the grid shares, on many tiles of both products."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from torch import fx

from tilestream.graph.lowering import MAX_FEATURES, Value
from tilestream.graph.nodes import is_product, is_view
from tilestream.ir.tileops import OPS
from tilestream.ir.verify import WIDEST as WIDEST_SUM
from tilestream.kernels.product.shared_tile import MOST_ROWS

WIDEST = 65_536
"""Columns of a layer that a shared tile may have: its CTAs divide them."""


NORMS = ("norm", "reduce")
ELEMENTWISE = ("unary", "binary")


def wide_blocks(
    nodes: Collection[fx.Node],
    known: Mapping[fx.Node, Value],
    tiles: Mapping[fx.Node, Collection[fx.Node]],
    kinds: Mapping[fx.Node, Sequence[str]],
    taken: Collection[fx.Node],
    left: Collection[fx.Node] = (),
) -> Iterator[list[list[fx.Node]]]:
    """Groups of ``nodes``, in their order: a product, what is computed elementwise in front of it, and the products
    of one input before that; with what makes that input, a norm, and what is done to the result, a residual. Nobody
    else uses what lies between, so a group is convex. The largest group comes first, then those without either.

    On many rows the result is wider than a fragment: narrower sums stay in registers (``graph.wide``). And no row
    stream begins with it, which would take the second layer.

    Args:
        known: what nodes are, layers of any width included; ``tiles``: their operands that have rows; ``kinds``: of
            the tile ops that they become; ``taken``: nodes of other regions, as they are when a block is asked for;
            ``left``: what many rows do in front is theirs whose product is in front of it.
    """
    for last in nodes:
        rows = known[last].rows if last in known else None
        if rows is None or not is_product(last) or not rows.is_Integer or int(rows) <= 0:
            continue
        shared = few(last, known)
        if not shared and known[last].tile.features <= WIDEST_SUM[0]:
            continue
        members, firsts = _before(last, tiles)
        inputs = {start_of(n, members, tiles) for n in firsts}
        closed = all(u in members for n in members if n is not last for u in n.users)
        wide = any(known[n].tile.features > MAX_FEATURES for n in members if n in known)
        if firsts and len(inputs) == 1 and None not in inputs and closed and wide:
            behind = after_product(last, known, kinds)
            if not shared and _feeds_a_stream([last, *behind][-1], known):
                continue
            (start,) = inputs
            groups = []
            for tail in ([*behind], []):
                group = {*members, *tail}
                free = [n for n in nodes if n not in taken and (shared or n not in left)]
                for front in (in_front(start, group, free, known, tiles, kinds), set()):
                    found = [n for n in nodes if n in group or n in front]
                    if found not in groups:
                        groups.append(found)
            yield groups


def _feeds_a_stream(result: fx.Node, known: Mapping[fx.Node, Value]) -> bool:
    """Whether a product reads ``result`` with which a row stream may begin: it has the layer in front of it too."""
    if known[result].tile.features > MAX_FEATURES:
        return False
    todo, seen = [result], {result}
    while todo:
        for user in todo.pop().users:
            if is_product(user):
                return True
            if user not in seen and is_view(user):
                seen.add(user)
                todo.append(user)
    return False


def few(node: fx.Node, known: Mapping[fx.Node, Value]) -> bool:
    """Whether a tile has so few rows, known now, that CTAs should share them."""
    rows = known[node].rows if node in known else None
    return rows is not None and bool(rows.is_Integer) and 0 < int(rows) <= MOST_ROWS


def after_product(
    last: fx.Node, known: Mapping[fx.Node, Value], kinds: Mapping[fx.Node, Sequence[str]]
) -> list[fx.Node]:
    """What is done elementwise to the result of ``last`` before anybody else sees it."""
    found: list[fx.Node] = []
    chain: list[fx.Node] = []
    node = last
    while len(node.users) == 1:
        (node,) = node.users
        if not _alike(node, last, known) or not _made_of(node, kinds, ELEMENTWISE):
            break
        chain.append(node)
        if not is_view(node) and {*kinds[node]} - {"load"} != {"cast"}:
            found = [*chain]  # views at the end stay outside, and so do casts: they only make the result larger
    return found


def in_front(
    start: fx.Node | None,
    group: set[fx.Node],
    nodes: Sequence[fx.Node],
    known: Mapping[fx.Node, Value],
    tiles: Mapping[fx.Node, Collection[fx.Node]],
    kinds: Mapping[fx.Node, Sequence[str]],
) -> set[fx.Node]:
    """What makes ``start``, which ``group`` reads, as far as it is elementwise or a norm and only the group uses it."""
    if start is None or start not in known:
        return set()
    found: set[fx.Node] = set()
    wanted = {start}
    for node in reversed(nodes):
        own = {*node.users} <= group | found and node in tiles
        if node in wanted and own and _of_rows(node, start, known) and _made_of(node, kinds, (*ELEMENTWISE, *NORMS)):
            found.add(node)
            wanted |= {*tiles[node]}
    while idle := {n for n in found if is_view(n) and found.isdisjoint(tiles[n])}:
        found -= idle  # views at the border stay outside
    return found


def _alike(a: fx.Node, b: fx.Node, known: Mapping[fx.Node, Value]) -> bool:
    return _of_rows(a, b, known) and known[a].tile.features == known[b].tile.features


def _of_rows(a: fx.Node, b: fx.Node, known: Mapping[fx.Node, Value]) -> bool:
    return a in known and known[a].rows == known[b].rows


def _made_of(node: fx.Node, kinds: Mapping[fx.Node, Sequence[str]], families: Collection[str]) -> bool:
    return all(OPS[kind].family in families or kind == "load" for kind in kinds[node])


def start_of(first: fx.Node, members: set[fx.Node], tiles: Mapping[fx.Node, Collection[fx.Node]]) -> fx.Node | None:
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
