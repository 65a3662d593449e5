"""Layers wider than a stage holds that can stream all the same: hidden layers, which are taken by chunks of columns,
and last layers of which only maxima over rows leave."""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from tilestream.graph.facts import Facts
from tilestream.graph.lowering import MAX_FEATURES
from tilestream.graph.nodes import is_view
from tilestream.ir.tileops import OPS
from tilestream.ir.verify import WIDEST
from tilestream.ir.ways import reached


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
    return inside if len(readers) == 1 and all(facts.width(n) <= WIDEST[0] for n in readers | read) else set()


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
