"""Layers wider than a stage of a row stream holds: feed-forward blocks, which a kernel of their own has, on few rows
one tile that the grid shares, on many tiles of both products; and such as can stream all the same, hidden layers by
chunks of columns, and last layers of which only maxima over rows leave."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from torch import fx

from tilestream.graph.facts import Facts
from tilestream.graph.lowering import MAX_FEATURES
from tilestream.graph.nodes import is_product, is_view
from tilestream.ir.tileops import OPS
from tilestream.ir.verify import WIDEST as WIDEST_SUM
from tilestream.ir.ways import reached

WIDEST = 65_536
"""Columns of a layer that a shared tile may have: its CTAs divide them."""


NORMS = ("norm", "reduce")
ELEMENTWISE = ("unary", "binary")
LONGEST = 16
"""Operators behind a product that are looked at. Assumed: GPT-2's GELU, written out, is eight."""


def wide_blocks(
    nodes: Collection[fx.Node], facts: Facts, taken: Collection[fx.Node], left: Collection[fx.Node] = ()
) -> Iterator[list[list[fx.Node]]]:
    """Groups of ``nodes``, in their order: a product, what is computed elementwise in front of it, and the products
    of one input before that; with what makes that input, a norm, and what is done to the result, a residual. Nobody
    else uses what lies between, so a group is convex. The largest group comes first, then those without either.

    On many rows the result is wider than a fragment: narrower sums stay in registers (``hidden``). And no row
    stream begins with it, which would take the second layer.

    Args:
        facts: of layers of any width; ``taken``: nodes of other regions, as they are when a block is asked for;
            ``left``: what many rows do in front is theirs whose product is in front of it.
    """
    for last in nodes:
        if not is_product(last) or facts.rows(last) <= 0:
            continue
        shared = facts.few(last)
        if not shared and facts.width(last) <= WIDEST_SUM[0]:
            continue
        members, firsts = _before(last, facts)
        inputs = {start_of(n, members, facts) for n in firsts}
        closed = all(u in members for n in members if n is not last for u in n.users)
        wide = any(facts.width(n) > MAX_FEATURES for n in members if n in facts.known)
        if firsts and len(inputs) == 1 and None not in inputs and closed and wide:
            behind = after_product(last, facts)
            if not shared and _feeds_a_stream([last, *behind][-1], facts):
                continue
            (start,) = inputs
            free = [n for n in nodes if n not in taken and (shared or n not in left)]
            yield forms([members], behind, start, nodes, free, facts)


def forms(
    middles: Sequence[set[fx.Node]],
    behind: Collection[fx.Node],
    start: fx.Node | None,
    nodes: Collection[fx.Node],
    free: Sequence[fx.Node],
    facts: Facts,
) -> list[list[fx.Node]]:
    """Groups in the order of ``nodes``, each once: what lies in the middle with and without what is ``behind``, the
    first of ``middles`` also with those of the ``free`` nodes in front of it that make ``start``."""
    found: dict[tuple[fx.Node, ...], None] = {}
    for tail in ({*behind}, set[fx.Node]()):
        widest = middles[0] | tail
        for group in (widest | in_front(start, widest, free, facts), *(middle | tail for middle in middles)):
            found[tuple(n for n in nodes if n in group)] = None
    return [list(group) for group in found]


def _feeds_a_stream(result: fx.Node, facts: Facts) -> bool:
    """Whether a product reads ``result`` with which a row stream may begin: it has the layer in front of it too."""
    if facts.width(result) > MAX_FEATURES:
        return False
    readers = reached(result.users, lambda n: n.users if is_view(n) and not is_product(n) else ())
    return any(map(is_product, readers))


def after_product(last: fx.Node, facts: Facts, *others: fx.Node) -> list[fx.Node]:
    """What is done elementwise to the result of ``last``, or to it and ``others``, before anybody else sees it, up to
    one value that others read: an activation that a model writes out reads its input more than once."""
    found: list[fx.Node] = []
    inside = [last, *others]
    while len(inside) <= LONGEST and (readers := {u for n in inside for u in n.users if u not in inside}):
        node = min(readers)
        alike = _of_rows(node, last, facts) and facts.width(node) == facts.width(last)
        if not alike or not _made_of(node, facts, ELEMENTWISE):
            break
        inside.append(node)
        left = [n for n in inside if not n.users.keys() <= {*inside}]
        if left == [node] and not is_view(node) and {*facts.kinds[node]} - {"load"} != {"cast"}:
            # Views at the end stay outside, and so do casts: they only make the result larger.
            found = inside[1 + len(others) :]
    return found


def in_front(start: fx.Node | None, group: set[fx.Node], nodes: Sequence[fx.Node], facts: Facts) -> set[fx.Node]:
    """What makes ``start``, which ``group`` reads, as far as it is elementwise or a norm and only the group uses it."""
    if start is None or start not in facts.known:
        return set()
    found: set[fx.Node] = set()
    wanted = {start}
    for node in reversed(nodes):
        own = {*node.users} <= group | found and node in facts.tiles
        if node in wanted and own and _of_rows(node, start, facts) and _made_of(node, facts, (*ELEMENTWISE, *NORMS)):
            found.add(node)
            wanted |= facts.tiles[node]
    while idle := {n for n in found if is_view(n) and found.isdisjoint(facts.tiles[n])}:
        found -= idle  # views at the border stay outside
    return found


def _of_rows(a: fx.Node, b: fx.Node, facts: Facts) -> bool:
    return a in facts.known and facts.known[a].rows == facts.known[b].rows


def _made_of(node: fx.Node, facts: Facts, families: Collection[str]) -> bool:
    return all(OPS[kind].family in families or kind == "load" for kind in facts.kinds[node])


def start_of(first: fx.Node, members: set[fx.Node], facts: Facts) -> fx.Node | None:
    """What a product of the first layer reads, whose views join ``members``: so one input stays one."""
    node, tiles = first, facts.tiles
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


def _before(last: fx.Node, facts: Facts) -> tuple[set[fx.Node], list[fx.Node]]:
    """``last`` and what it is made from, back to the products before it; no products where it reaches an input."""
    members = reached([last], lambda n: facts.tiles.get(n, ()) if n is last or not is_product(n) else ())
    others = members - {last}
    whole = all(n in facts.tiles and (is_product(n) or facts.tiles[n]) for n in others)
    return members, [n for n in others if is_product(n)] if whole else []


def hidden(nodes: Sequence[fx.Node], facts: Facts) -> frozenset[fx.Node]:
    """Wide nodes of which a kernel can be made: linears and what follows element by element, up to one linear that

    alone reads them and whose own columns, and those of what they are made from, a fragment holds.
    """
    found: set[fx.Node] = set()
    for node in _wide_linears(nodes, facts):
        found |= set() if node in found else _layer(node, facts)
    return frozenset(found)


def pooled(nodes: Sequence[fx.Node], facts: Facts) -> frozenset[fx.Node]:
    """Wide nodes that a kernel makes block by block: a linear of what registers hold, and what follows element by

    element, of which nothing but a maximum over rows is wanted. Whatever else leaves a kernel so wide takes as much
    memory as it would behind a library's product.
    """
    found: set[fx.Node] = set()
    for node in _wide_linears(nodes, facts):
        if node not in found and all(facts.width(x) <= MAX_FEATURES for x in facts.tiles[node] & facts.known.keys()):
            found |= _up_to_maxima(node, facts)
    return frozenset(found)


def _wide_linears(nodes: Sequence[fx.Node], facts: Facts) -> list[fx.Node]:
    """Linears of many rows wider than a stage holds."""
    linears = (n for n in nodes if _is_linear(n, facts) and not facts.few(n))
    return [n for n in linears if facts.width(n) > MAX_FEATURES]


def _up_to_maxima(start: fx.Node, facts: Facts) -> set[fx.Node]:
    """A linear and what follows element by element up to maxima over rows; nothing where anything else reads it."""

    def follows(node: fx.Node) -> bool:
        return node is start or (_follows(node, start, facts) and not _is_linear(node, facts))

    def readers(node: fx.Node) -> list[fx.Node]:
        return [u for u in node.users if "max_rows" not in facts.kinds.get(u, ())] if follows(node) else []

    inside = reached([start], readers)
    return inside if all(map(follows, inside)) else set()


def _layer(start: fx.Node, facts: Facts) -> set[fx.Node]:
    """The hidden layer around a wide linear; nothing where it is none."""

    def beside(node: fx.Node) -> list[fx.Node]:
        """What else is of the layer: who goes on with a node, and, but for linears, what it is made from."""
        if not _follows(node, start, facts):
            return []
        made_from = () if _is_linear(node, facts) else facts.tiles[node] & facts.known.keys()
        return [*made_from, *(u for u in node.users if not _is_linear(u, facts))]

    inside = reached([start], beside)
    if not all(_follows(n, start, facts) for n in inside):
        return set()
    readers = {u for n in inside for u in n.users if _is_linear(u, facts)}
    read = {x for n in inside if _is_linear(n, facts) for x in facts.tiles[n] & facts.known.keys()}
    return inside if len(readers) == 1 and all(facts.width(n) <= WIDEST_SUM[0] for n in readers | read) else set()


def _follows(node: fx.Node, start: fx.Node, facts: Facts) -> bool:
    """Whether ``node`` computes a tile as wide as ``start`` element by element, or is that tile under another shape."""
    return node in facts.known and facts.width(node) == facts.width(start) and _plain(node, facts)


def _plain(node: fx.Node, facts: Facts) -> bool:
    kinds = facts.kinds.get(node, ("",))
    if is_view(node) or {*kinds} <= {"load"}:  # a dropout that is off leaves a copy, which is no op
        return node in facts.known
    families = {OPS[k].family for k in kinds if k and k != "load"}
    return bool(families) and families <= {"unary", "binary", "linear"}


def _is_linear(node: fx.Node, facts: Facts) -> bool:
    return "linear" in facts.kinds.get(node, ())
