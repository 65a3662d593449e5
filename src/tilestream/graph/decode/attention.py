"""Attention of one token over a static cache: its arguments, rotary embedding, writes into the cache."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx

from tilestream.graph.decode.reading import SAME, either, only, peeled, shape_of
from tilestream.graph.nodes import Unsupported, aten, packet
from tilestream.graph.rewrites.shared_keys import given_to, is_attention, mask_given


@dataclass(frozen=True)
class TokenAttention:
    """Of one token: ``key`` and ``values`` are its own, ``updates`` what writes them at ``index`` into ``caches``."""

    node: fx.Node
    query: fx.Node
    key: fx.Node
    values: fx.Node
    caches: list[fx.Node]
    updates: list[fx.Node]
    index: fx.Node
    scale: float
    mask: fx.Node | None


@dataclass(frozen=True)
class Rotary:
    """Of ``x``: its first ``features`` of a head are rotated, 0 where none are."""

    x: fx.Node
    features: int = 0
    cos: fx.Node | None = None
    sin: fx.Node | None = None


def attention_of(attended: fx.Node) -> TokenAttention:
    """The attention that an output projection reads.

    Raises:
        Unsupported: it is none over a static cache, and what differs.
    """
    attention = only(peeled(attended))
    if not is_attention(attention):
        raise Unsupported("what the output projection reads is no fused attention", attention)
    given = given_to(attention)
    if given.get("is_causal") or given.get("dropout_p"):
        raise Unsupported("attention is causal by itself, or drops", attention)
    key, values = _update(given["key"]), _update(given["value"])
    if key.args[2] is not values.args[2]:
        raise Unsupported("keys and values are not of one position", attention)
    mask = mask_given(given)
    caches: Any = [key.args[0], values.args[0]]
    if any(c.op != "placeholder" for c in caches):
        raise Unsupported("the cache is not an argument of the graph", key)
    scale, narrow = given.get("scale") or shape_of(key)[3] ** -0.5, None if mask is None else _single(mask)
    own: list[Any] = [given["query"], key.args[3], values.args[3]]
    return TokenAttention(attention, own[0], own[1], own[2], caches, [key, values], peeled(key.args[2]), scale, narrow)


def rotary_of(node: Any) -> Rotary:
    """What queries or keys are before their rotary embedding, of all features or of the first ones, if there is one."""
    made = peeled(node)
    if packet(made) is aten.add:
        x, cos, sin = _rotary(made)
        return Rotary(x, shape_of(made)[-1], cos, sin)
    parts: Any = made.args[0] if packet(made) is aten.cat else ()
    if len(parts) != 2 or packet(peeled(parts[0])) is not aten.add:
        return Rotary(made)
    (x, cos, sin), width = _rotary(parts[0]), shape_of(made)[-1]
    features, rest = shape_of(parts[0])[-1], parts[1]
    source = peeled(x.args[0] if _is_slice(x, 0, features) else x)
    if not _is_slice(rest, features, width) or peeled(rest.args[0]) is not source:
        raise Unsupported("no rotary embedding of a head's first features", made)
    return Rotary(source, features, cos, sin)


def _rotary(node: Any) -> tuple[fx.Node, fx.Node, fx.Node]:
    """Input, cosines and sines of ``x * cos + rotate_half(x) * sin``."""
    added = peeled(node)
    if packet(added) is not aten.add or len(added.all_input_nodes) != 2:
        raise Unsupported("no rotary embedding", added)
    halves, plain = either(
        added, lambda n: packet(n) is aten.mul and any(packet(i) is aten.cat for i in n.all_input_nodes)
    )
    joined, sin = either(halves, lambda n: packet(n) is aten.cat)
    parts: Any = joined.args[0]
    if packet(joined) is not aten.cat or len(parts) != 2 or packet(parts[0]) is not aten.neg:
        raise Unsupported("no rotation of halves", added)
    high, low = parts[0].args[0], parts[1]
    half = shape_of(joined)[-1] // 2
    if not (_is_slice(low, 0, half) and _is_slice(high, half, 2 * half)) or low.args[0] is not high.args[0]:
        raise Unsupported("no rotation of halves", joined)
    x, cos = either(plain, lambda n: n is low.args[0])
    if x is not low.args[0] or packet(plain) is not aten.mul:
        raise Unsupported("no rotary embedding", added)
    return x, cos, sin


def _is_slice(node: fx.Node, start: int, end: int) -> bool:
    if packet(node) is not aten.slice:
        return False
    width = shape_of(node.args[0])[-1]
    dim, first, last, *step = [*node.args[1:], *(0, 0, width)[len(node.args) - 1 :]]
    return (
        dim in (-1, len(shape_of(node)) - 1) and (first or 0) == start and min(last, width) == end and step in ([], [1])
    )


def _update(node: fx.Node) -> fx.Node:
    """The write into a cache, of keys or values that attention reads, each head perhaps several times."""
    found = _single(peeled(node))
    if packet(found) is not aten.index_copy or found.args[1] not in (2, -2):
        raise Unsupported("attention does not read a static cache that the token was copied into", found)
    seen, kept = shape_of(node), shape_of(found)
    if len(kept) != 4 or seen[1] % kept[1] or [seen[0], *seen[2:]] != [kept[0], *kept[2:]]:
        raise Unsupported("attention reads the cache in another shape", node)
    if seen[1] != kept[1] and not _repeats(node, found):
        raise Unsupported("heads of keys are not repeated one by one", node)
    return found


def _repeats(node: fx.Node, single: fx.Node) -> bool:
    """Whether each head of ``single`` comes several times, one behind the other."""
    _, heads, positions, features = shape_of(single)
    while packet(node) in SAME and packet(node) is not aten.unsqueeze:
        node = only(node)
    if packet(node) is not aten.expand:
        return False
    before = only(node)
    wide = shape_of(node)
    return (
        packet(before) is aten.unsqueeze
        and [wide[1], *wide[3:]] == [heads, positions, features]
        and shape_of(before)[2] == 1
    )


def _single(node: fx.Node) -> fx.Node:
    """A mask, keys or values before they were repeated for heads."""
    while packet(node) in (aten.expand, *SAME):
        node = only(node)
    return node
