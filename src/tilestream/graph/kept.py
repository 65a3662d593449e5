"""How much a backward graph keeps at once: a region makes a few gradients, whose weights' gradients follow.

A chain of layers as one region has the gradients of all of them beside all that the forward graph saved. Cut into
pieces, what a piece made and what was saved for it is freed before the next one runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from torch import fx

from tilestream.graph.nodes import aten, is_product, is_view, packet, value
from tilestream.graph.sizes import hint

MOST_RESULTS = 3
"""Gradients of one region of a backward graph, as Inductor's own code has at a time. NeRF's step at 65,536 points takes
807 us with three of them and 390 MiB, 790 us and 422 MiB with four, 819 us and 623 MiB uncut (H200)."""
SMALL_BYTES = 64 * 2**20
"""What a region may make however many gradients that is: a cut costs microseconds, and saves no more than this."""
CHAIN_WIDTH = 64
"""Columns of the layers that backward chains are made of (``schedule.backward``)."""
NARROW = 8
"""A result of less than this part of the widest one's bytes, the statistics of rows, is no gradient to count."""


def pieces(group: Sequence[fx.Node], spared: int = 0) -> list[list[fx.Node]]:
    """A convex group, in graph order, as pieces of about equally many results; each begins at a product.

    Pieces are convex, since whatever lies between two nodes of one is in the group, and between them in its order.

    Args:
        spared: bytes that were not saved although Inductor would have: a region may make these as well.
    """
    members = set(group)
    results = {n for n in group if value(n) is not None and any(u not in members for u in n.users)}
    total, widest = sum(map(_bytes, results)), max(map(_bytes, results), default=0)
    results = {n for n in results if NARROW * _bytes(n) >= widest}
    count = ceil(len(results) / MOST_RESULTS)
    if count < 2 or total <= SMALL_BYTES + spared or _stays_on_chip(group):
        return [list(group)]
    most, have = ceil(len(results) / count), 0
    made: list[list[fx.Node]] = [[]]
    for node in group:
        if have >= most and is_product(node):
            made.append([])
            have = 0
        made[-1].append(node)
        have += node in results
    return made


def _stays_on_chip(group: Sequence[fx.Node]) -> bool:
    """Whether a group is products up to ``CHAIN_WIDTH`` wide and ReLUs' derivatives alone: with the sums that read its
    gradients it becomes one kernel, a backward chain, which leaves none of them in memory."""
    for node in group:
        made = value(node)
        if is_view(node):
            continue
        if packet(node) not in (aten.mm, aten.threshold_backward) or made is None:
            return False
        columns = [f.shape[-1] for n in (node, *node.all_input_nodes) if (f := value(n)) is not None]
        if not all(isinstance(n, int) and n <= CHAIN_WIDTH and n % 8 == 0 for n in columns):
            return False
    return True


def _bytes(node: fx.Node) -> int:
    made = node.meta["val"]
    return prod(map(hint, made.shape)) * made.element_size()
