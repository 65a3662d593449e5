"""Sorts of small numbers, as a router's choice of experts: one sort of few bits, which counts them as well.

torch sorts all 64 bits of an expert's number; whoever counts how many tokens each has adds ones by atomics.
"""

from __future__ import annotations

from operator import getitem
from typing import Any

import torch
from torch import fx

from tilestream.graph.nodes import argument, aten, behind, packet, value
from tilestream.graph.rewrites.busy import END
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.insert import call, cast, size
from tilestream.graph.rewrites.operators import INDEX, SEGMENTS
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.rewrites.unsorted import inverse, permutation
from tilestream.graph.sizes import settled
from tilestream.graph.sums import constant

SAME = {aten.view, aten._unsafe_view, aten.reshape, aten.flatten, aten.clone, aten.contiguous, aten.detach, aten.alias}
"""Operators that leave the numbers what they are, row by row."""
MOST_VALUES = 2**20
EXACT = (torch.int32, torch.int64, torch.float32, torch.float64)


@each(aten.sort)
def count_small_keys(node: fx.Node, settings: Settings) -> fx.Node | None:
    """Sorts of what a ``topk`` chose, in ascending order, become ``tilestream::segments``, and those of an order its
    inverse."""
    keys: Any = node.args[0]
    if settings.sums is None or not _ascends(node):
        return None
    if permutation(keys):
        _invert(node, keys)
    elif (below := values_below(keys)) is not None:
        _Counted(node, keys, below).replace()
    else:
        return None
    return node


def _ascends(node: fx.Node) -> bool:
    """Whether it sorts one dimension, the smallest first."""
    fake = value(node.args[0])
    more = node.args[1:] if node.target is aten.sort.default else (node.args[2:] or ())
    descending = node.kwargs.get("descending", more[1] if len(more) > 1 else False)
    return fake is not None and fake.dim() == 1 and not descending


def values_below(node: fx.Node) -> int | None:
    """What numbers are surely below, none of them negative; None where that is not known."""
    node = behind(node, lambda n: packet(n) in SAME)
    if node.target is not getitem or node.args[1] != 1 or packet(node.all_input_nodes[0]) not in (aten.topk, aten.max):
        return None
    chosen = node.all_input_nodes[0]
    of, at = value(chosen.args[0]), argument(chosen, 2 if packet(chosen) is aten.topk else 1, "dim", -1)
    if of is None or not of.dim() or not isinstance(at, int):
        return None
    count = settled(of.shape[at])
    return count if isinstance(count, int) and 0 < count <= MOST_VALUES else None


def _invert(sort: fx.Node, order: fx.Node) -> None:
    places = call(sort, aten._to_copy.default, inverse(order, order), dtype=torch.int64)
    count = size(order, order)
    numbers = call(order, aten.arange.default, count, dtype=torch.int64, device=order.meta["val"].device)
    for user in list(sort.users):
        user.replace_all_uses_with(places if user.args[1] == 1 else cast(user, numbers))


class _Counted:
    """
    Args:
        keys: what ``sort`` sorts, of which all are ``below``.
    """

    def __init__(self, sort: fx.Node, keys: fx.Node, below: int) -> None:
        self.sort, self.keys, self.below = sort, keys, below

    def replace(self) -> None:
        with self.sort.graph.inserting_before(self.keys.next):
            made = call(self.keys, SEGMENTS, self.keys, self.below)
            found, starts = (call(self.keys, getitem, made, k) for k in (0, 1))
            found.meta[INDEX] = self.keys.name
            order = call(self.keys, aten._to_copy.default, found, dtype=torch.int64)
        for user in [u for u in self.sort.users if u.args[1] == 1]:
            user.replace_all_uses_with(order)
        for user in [u for n in self._numbers(order) for u in n.users if self._counts(u, n)]:
            self._count(user, starts)
        for ordered in [u for u in self.sort.users if u.args[1] == 0 and u.users]:
            with ordered.graph.inserting_before(ordered):
                ordered.replace_all_uses_with(call(ordered, aten.index_select.default, self.keys, 0, order))

    def _numbers(self, order: fx.Node) -> list[fx.Node]:
        """What has all keys, in any order, as numbers that hold them."""
        found = [self.keys, *(u for u in self.sort.users if u.args[1] == 0)]
        for node in found:
            for user in node.users:
                picked = user.target is aten.index.Tensor and user.args == (self.keys, [order])
                if picked or (packet(user) is aten._to_copy and user.meta["val"].dtype in EXACT):
                    found.append(user)
        return found

    def _counts(self, user: fx.Node, keys: fx.Node) -> bool:
        """Whether it counts how often each key comes: adds ones, or is a histogram with a bin for each."""
        given: Any = user.args
        if user.target is aten.scatter_add.default:
            zeros, _, index, ones = given
            fake = value(user)
            whole = fake is not None and fake.dim() == 1 and settled(fake.shape[0]) == self.below
            return whole and index is keys and constant(zeros) == 0.0 and constant(ones) == 1.0
        return user.target is aten.histc.default and given[1:] == (self.below, 0, self.below - 1)

    def _count(self, user: fx.Node, starts: fx.Node) -> None:
        with user.graph.inserting_before(user):
            ends, firsts = (call(user, aten.slice.Tensor, starts, 0, *cut) for cut in ((1, END), (0, -1)))
            count = cast(user, call(user, aten.sub.Tensor, ends, firsts))
        for total in [t for t in user.users if packet(t) is aten.cumsum and t.args[1] in (0, -1)]:
            with total.graph.inserting_before(total):
                # a copy: whoever reads it may want it aligned
                total.replace_all_uses_with(cast(total, call(total, aten.clone.default, ends)))
        user.replace_all_uses_with(count)
