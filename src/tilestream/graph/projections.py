"""Layers by themselves: products of one input, with a norm in front and what is done to each behind."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from itertools import combinations
from math import prod

from torch import fx

from tilestream.graph.convolutions import is_convolution
from tilestream.graph.facts import Facts
from tilestream.graph.few_rows import after_product, forms, start_of
from tilestream.graph.lowering import MAX_FEATURES
from tilestream.graph.nodes import arguments, is_product, is_slice, is_view, readers
from tilestream.ir.ways import reached

WIDEST_ALONE = 32_768
"""Columns of a layer by itself: more, a language model's head, no grid divides into so few that a CTA can hold them."""

FEW_PIXELS = 1024
"""Output pixels of a convolution up to which it goes alone: as a row stream they are 16 tiles."""
LONG_SUM = 1024
"""Columns of all taps from which it does on any number of pixels. H200, 25,088 pixels of 128 channels, norms and
residual: 17.6 us and 30.6 for the 1 x 1 behind it and the next block's, 52.6 as one kernel."""


def lone_layers(nodes: Collection[fx.Node], facts: Facts, taken: Collection[fx.Node]) -> Iterator[list[list[fx.Node]]]:
    """Groups of ``nodes``, in their order: all products of one input that no row stream holds, queries, keys and
    values, with what makes that input where nobody else uses it, and what is done elementwise to each. The largest
    group comes first, then those without what is behind, without what is in front; and of several products each alone.
    Before all, two of which one value is made, as of a gate: its activation and the product of both are behind them.

    On many rows they are layers that no row stream holds, and such of which a kernel does more than a library's
    product: several of one input, with a norm in front, or something elementwise behind.

    All members of a group are made from its input and from tensors outside of it that do not depend on it: what goes
    beside one of several results, which might, is refused by whoever asks what the group is
    (``kernels.product.shared_tile.is_block``). So a group is convex.

    Args:
        facts, taken: as ``few_rows.wide_blocks`` has them.
    """
    starts: dict[fx.Node, dict[fx.Node, set[fx.Node]]] = {}
    for node in nodes:
        if node in taken or not is_product(node) or node not in facts.known or facts.width(node) > WIDEST_ALONE:
            continue
        views: set[fx.Node] = set()
        start = start_of(node, views, facts)
        if start is not None and facts.rows(node) > 0:
            starts.setdefault(start, {})[node] = {node, *views}
    for start, products in starts.items():
        for members, behind in _gated(products, facts):
            found = forms([members], behind, start, nodes, [n for n in nodes if n not in taken], facts)
            yield [group for group in found if behind[-1] in group]
        for several in ([*products], *([one] for one in products if len(products) > 1)):
            shared = facts.few(several[0])
            wide = [*map(facts.width, several), *([_features(start)] if shared else [])]
            if max(wide) > MAX_FEATURES:
                free = [n for n in nodes if n not in taken]  # by now
                # Where views are of other rows, as heads put together again are, they stay outside.
                middles = [set().union(*(products[one] for one in several)), {*several}]
                behind = {n for one in several for n in after_product(one, facts)}
                found = forms(middles, behind, start, nodes, free, facts)
                yield [group for group in found if shared or sum(not is_view(n) for n in group) > 1]


def behind_derivatives(
    nodes: Collection[fx.Node], facts: Facts, taken: Collection[fx.Node]
) -> Iterator[list[list[fx.Node]]]:
    """Of a backward graph, products that no row stream holds with what is done elementwise to each, as the derivative
    of an activation (``rewrites.derivatives``)."""
    for node in nodes:
        if node not in taken and is_product(node) and node in facts.known and facts.width(node) > MAX_FEATURES:
            behind = after_product(node, facts)
            if behind:
                yield [[node, *behind]]


def _gated(products: Mapping[fx.Node, set[fx.Node]], facts: Facts) -> Iterator[tuple[set[fx.Node], list[fx.Node]]]:
    """Two products of one input, or one of which only two slices are used, as wide as no row stream holds; with views.
    And what is made elementwise of both, up to one value.

    Args:
        products: with the views between the input and each.
    """
    found: list[tuple[set[fx.Node], list[fx.Node]]] = []
    for one, views in products.items():
        inside = reached([one], lambda n, one=one: n.users if n is one or _whole_view(n) else ())
        slices = readers(one, _whole_view)
        if all(map(is_slice, slices)) and all(n in facts.known for n in inside):
            found.append(({*inside, *views}, slices))
    found += [({a, b} | products[a] | products[b], [a, b]) for a, b in combinations(products, 2)]
    for members, parts in found:
        if len(parts) == 2 and MAX_FEATURES < facts.width(parts[0]) == facts.width(parts[1]):
            behind = after_product(parts[0], facts, parts[1])
            if behind:
                yield members, behind


def _whole_view(node: fx.Node) -> bool:
    return is_view(node) and not is_slice(node)


def behind_layers(nodes: Collection[fx.Node], facts: Facts) -> frozenset[fx.Node]:
    """What many rows have behind a product that no row stream holds, up to where more than one op reads it: with the
    sum of a residual, a layer by itself. In the block behind it, it would be computed twice, from two tensors."""
    products = (n for n in nodes if is_product(n) and n in facts.known and not facts.few(n))
    wide = (n for n in products if facts.width(n) > MAX_FEATURES)
    return frozenset(b for n in wide for b in after_product(n, facts) if not is_view(b) and len(b.users) > 1)


def lone_convolutions(
    nodes: Collection[fx.Node], facts: Facts, taken: Collection[fx.Node]
) -> Iterator[list[list[fx.Node]]]:
    """Likewise convolutions that go alone, with what is done elementwise behind each, and without: those of few output
    pixels, of which a row stream would keep as few SMs busy as there are tiles; and those of long sums, whose tiles are
    long on their way, while tiles of the layers behind are short and many.
    """
    for node in nodes:
        if node not in taken and node in facts.known and is_convolution(node) and _goes_alone(node, facts):
            behind = after_product(node, facts)
            yield [[node, *behind], [node]] if behind else [[node]]


def _goes_alone(node: fx.Node, facts: Facts) -> bool:
    out, *taken = arguments(node)[1].meta["val"].shape
    return prod(taken) > LONG_SUM or 0 < facts.rows(node) <= FEW_PIXELS


def _features(node: fx.Node) -> int:
    """Columns of the rows that a node makes; 0 where they are not known."""
    fake = node.meta.get("val")
    size = fake.shape[-1] if fake is not None and hasattr(fake, "shape") and fake.dim() else 0
    return size if isinstance(size, int) else 0
