"""How much a backward graph keeps at once: a region makes a few gradients, whose weights' gradients follow.

A chain of layers as one region has the gradients of all of them beside all that the forward graph saved. Cut into
pieces, what a piece made and what was saved for it is freed before the next one runs. So the first pieces are short,
while most of what was saved is there, and the last ones long.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Collection, Sequence
from itertools import pairwise
from math import ceil

from torch import fx

from tilestream.graph.gradients import aliases
from tilestream.graph.live import Live, tensor_bytes
from tilestream.graph.nodes import DERIVATIVES, aten, is_product, is_view, packet, value
from tilestream.ir.ways import reached

MOST_RESULTS = 3
"""Gradients that a piece makes on average, as many as Inductor's own code has at a time. NeRF's step at 65,536 points
takes 807 us with at most three of them and 390 MiB, 790 us and 422 MiB with four, 819 us and 623 MiB uncut (H200)."""
SMALL_BYTES = 64 * 2**20
"""What a region may make however many gradients that is: a cut costs microseconds, and saves no more than this."""
CHAIN_WIDTH = 128
"""Columns of the layers that backward chains are made of (``kernels.gradients``)."""
_MADE_AGAIN = {
    aten.gelu, aten.silu, aten.elu, aten.leaky_relu, aten.softplus, aten.hardsigmoid, aten.hardswish, aten.hardtanh,
}  # fmt: skip
"""Activations whose result is not saved (``graph.recompute``)."""
NARROW = 8
"""A result of less than this part of the widest one's bytes, the statistics of rows, is no gradient to count."""


def pieces(group: Sequence[fx.Node], spared: int = 0, summed: Collection[str] = ()) -> list[list[fx.Node]]:
    """A convex group, in graph order, as pieces of ``MOST_RESULTS`` gradients on average; each begins at a product.

    Of all cuts into so many pieces, those during which least lives at once; of these, one whose pieces read least again
    of what the ones before them made.

    Pieces are convex, since whatever lies between two nodes of one is in the group, and between them in its order.

    What stands in front of the layers of a backward chain, as the derivative of a norm, is a piece of its own, and so
    is the chain: it begins with a gradient in memory, which the sums want there anyway.

    Args:
        spared: bytes that were not saved although Inductor would have: a region may make these as well.
        summed: names of nodes that sum over rows in launches of ours, gradients of weights.
    """
    front, chain = _front(group, summed)
    if chain:
        rest = [n for n in group if n not in {*front, *chain}]
        return [front, chain, *(pieces(rest, spared, summed) if rest else [])]
    members = set(group)
    results = {n for n in group if value(n) is not None and any(u not in members for u in n.users)}
    total, widest = sum(map(tensor_bytes, results)), max(map(tensor_bytes, results), default=0)
    count = ceil(sum(NARROW * tensor_bytes(n) >= widest for n in results) / MOST_RESULTS)
    if count < 2 or total <= SMALL_BYTES + spared or _on_chip(group):
        return [list(group)]
    steps = _steps(group, results)
    bounds = _bounds(Live.of(steps), min(count, len(steps)), widest // NARROW)
    return [[n for step in steps[start:end] for n in step] for start, end in pairwise(bounds)]


def _steps(group: Sequence[fx.Node], results: set[fx.Node]) -> list[list[fx.Node]]:
    """The shortest pieces: each begins at a product and makes a result at least."""
    made: list[list[fx.Node]] = [[]]
    for node in group:
        if is_product(node) and not results.isdisjoint(made[-1]):
            made.append([])
        made[-1].append(node)
    if len(made) > 1 and results.isdisjoint(made[-1]):
        made[-2] += made.pop()
    return made


def _bounds(live: Live, count: int, least: int) -> tuple[int, ...]:
    """Where ``count`` pieces of all steps start, and where the last one ends: of the lowest peak, or up to ``least``
    bytes above it."""
    steps = len(live.made)
    peaks = sorted({live.during(start, end) for start in range(steps) for end in range(start + 1, steps + 1)})
    lowest = bisect_left(peaks, True, key=lambda peak: _within(live, count, peak) is not None)
    found = _within(live, count, peaks[lowest] + least)
    assert found is not None
    return found


def _within(live: Live, count: int, peak: int) -> tuple[int, ...] | None:
    """The bounds of ``count`` pieces with at most ``peak`` bytes during each, if there are: those with least to read
    again, then with the most even ones."""
    # By where a piece ends: bytes read again, the squares of the pieces' lengths, bounds.
    best: dict[int, tuple[int, int, tuple[int, ...]]] = {0: (0, 0, (0,))}
    for _ in range(count):
        longer: dict[int, tuple[int, int, tuple[int, ...]]] = {}
        for start, (again, squares, bounds) in best.items():
            for end in range(start + 1, len(live.made) + 1):
                if live.during(start, end) <= peak:
                    cut = (again + live.handed(start), squares + (end - start) ** 2, (*bounds, end))
                    longer[end] = min(longer.get(end, cut), cut)
        best = longer
    found = best.get(len(live.made))
    return None if found is None else found[-1]


def _front(group: Sequence[fx.Node], summed: Collection[str]) -> tuple[list[fx.Node], list[fx.Node]]:
    """What the first product of a group is of, and the backward chain that begins with that product; nothing where the
    product is of what is in memory, or a layer follows that is too wide for the chain."""
    start = next((k for k, n in enumerate(group) if is_product(n)), len(group))
    dy = group[start].args[0] if start < len(group) else None
    if not isinstance(dy, fx.Node) or not any(u.name in summed for each in aliases(dy) for u in each.users):
        return [], []
    before = set(group[:start])
    made = before & {dy, *(n for n in before if not _on_chip([n]))}  # the rest: activations that the chain makes again
    made = reached(made, lambda node: before.intersection(node.all_input_nodes))
    behind = [n for n in group if n not in made]
    end = next((k for k in range(len(behind)) if not _on_chip(behind[: k + 1])), len(behind))
    chain = behind[:end]
    follows = next((n for n in behind[end:] if is_product(n)), None)
    alone = {x for n in chain for x in n.all_input_nodes} & made <= {dy}
    if dy not in made or all(map(is_view, made)) or not alone or (follows is not None and follows.args[0] in chain):
        return [], []
    return [n for n in group if n in made], chain


def _on_chip(group: Sequence[fx.Node]) -> bool:
    """Whether a group is products up to ``CHAIN_WIDTH`` wide and activations between them alone, perhaps added to
    something at the end: with the sums that read its gradients it becomes a backward chain, which leaves none of them
    in memory, or one at a time."""
    last = max((k for k, node in enumerate(group) if is_product(node)), default=-1)
    for k, node in enumerate(group):
        made = value(node)
        if is_view(node):
            continue
        added = packet(node) is aten.add and k > last
        if (packet(node) not in {aten.mm, *DERIVATIVES, *_MADE_AGAIN} and not added) or made is None:
            return False
        columns = [f.shape[-1] for n in (node, *node.all_input_nodes) if (f := value(n)) is not None]
        if not all(isinstance(n, int) and n <= CHAIN_WIDTH and n % 8 == 0 for n in columns):
            return False
    return True
