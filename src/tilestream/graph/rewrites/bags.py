"""``EmbeddingBag``: rows of a table that indices name, reduced bag by bag.

Gathered rows are written nowhere where a ragged region takes them. In training bags stay PyTorch's.
"""

from __future__ import annotations

from math import inf
from operator import getitem
from typing import Any

import torch
from torch import fx

from tilestream.graph.nodes import argument, aten, packet, value
from tilestream.graph.rewrites.given_bounds import MOST_FEATURES, MOST_ROWS, Bounds, size
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.settings import APART, Settings
from tilestream.graph.sizes import hint, settled
from tilestream.graph.sums import DTYPES

SUM, MEAN, MAX = 0, 1, 2


def open_bags(graph: fx.Graph, settings: Settings) -> int:
    """Bags become gathers and reductions over bounds; how many did. Others say why not."""
    if settings.sums is None:
        return 0
    bags = [n for n in graph.nodes if packet(n) in (aten._embedding_bag, aten._embedding_bag_forward_only)]
    made = 0
    for node in bags:
        if not node.users:
            continue
        if (why := why_not(node)) is not None:
            node.meta[APART] = f"an EmbeddingBag {why}"
            continue
        _Bag(node).replace()
        made += 1
    return made


def why_not(node: fx.Node) -> str | None:
    """Why a bag stays as it is; None where it need not."""
    weight, indices, offsets = (value(x) for x in node.args[:3])
    if weight is None or indices is None or offsets is None or weight.dtype not in DTYPES:
        return "of another dtype than float32, bfloat16 or float16"
    features = settled(weight.shape[1])
    if not isinstance(features, int) or not 0 < features <= MOST_FEATURES:
        return f"of more than {MOST_FEATURES} features"
    if hint(indices.shape[0]) > MOST_ROWS:
        return "of so many rows that int32 does not number them"
    more = [n for n in node.users if n.target is not getitem or n.args[1] != 0]
    if any(n.users if n.target is getitem else True for n in more):
        return "in training, or one whose other results are read"
    return None


class _Bag:
    def __init__(self, node: fx.Node) -> None:
        given: Any = node.args
        self.node = node
        self.weight, self.indices, self.offsets = given[:3]
        self.mode = argument(node, 4, "mode", SUM)
        self.shares: Any = argument(node, 6, "per_sample_weights")
        self.closed = bool(argument(node, 7, "include_last_offset", False))
        self.padding = argument(node, 8, "padding_idx", -1)

    def replace(self) -> None:
        node, graph = self.node, self.node.graph
        with graph.inserting_before(node):
            bounds = self._bounds()
            self.counted = self._mask(bounds)
            made = self._result(bounds)
        for user in [u for u in node.users if u.args[1] == 0]:
            user.replace_all_uses_with(made)
        made.meta["val"] = node.meta["val"][0]

    def _bounds(self) -> Bounds:
        """As PyTorch's kernel, which takes the last bag to the end whatever the last offset says."""
        node, offsets = self.node, self.offsets
        if self.closed:
            offsets = call(node, aten.slice.Tensor, offsets, 0, 0, -1)
        return Bounds.joined(node, [offsets, None], size(node, self.indices))

    def _mask(self, bounds: Bounds) -> fx.Node | None:
        """1 for each index that counts, 0 for padding, float32 [indices]; None where all count."""
        if self.padding == -1:
            return None
        return bounds.cast(bounds.call(aten.ne.Scalar, self.indices, self.padding), torch.float32)

    def _kept(self, bounds: Bounds, rows: fx.Node) -> fx.Node:
        """``rows``, and 0 in the place of padding, whatever is there; a mask of floats may be saved for a region."""
        if self.counted is None:
            return rows
        mask = bounds.wide(bounds.cast(self.counted, rows.meta["val"].dtype), 2)
        return bounds.call(aten.threshold_backward.default, rows, mask, 0)

    def _counts(self, bounds: Bounds) -> fx.Node:
        """Rows of each bag that count, float32 [bags, 1]."""
        return bounds.lengths(2) if self.counted is None else bounds.wide(bounds.reduced(self.counted), 2)

    def _means(self, bounds: Bounds, of: fx.Node) -> fx.Node:
        return bounds.divided(of, bounds.call(aten.clamp_min.default, self._counts(bounds), 1.0))

    def _result(self, bounds: Bounds) -> fx.Node:
        rows = bounds.call(aten.embedding.default, self.weight, self.indices)
        if self.shares is not None:
            rows = bounds.call(aten.mul.Tensor, rows, bounds.wide(self.shares, 2))
        if self.mode != MAX:
            total = bounds.reduced(self._kept(bounds, rows))
            return self._means(bounds, total) if self.mode == MEAN else total
        if self.counted is None:
            return bounds.reduced(rows, "max")
        counts = bounds.call(aten.gt.Scalar, bounds.wide(self.counted, 2), 0.0)
        most = bounds.reduced(bounds.call(aten.where.ScalarOther, counts, rows, -inf), "max")
        some = bounds.call(aten.gt.Scalar, self._counts(bounds), 0.0)
        return bounds.call(aten.where.ScalarOther, some, most, 0.0)
