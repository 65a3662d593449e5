"""``EmbeddingBag``: rows of a table that indices name, reduced bag by bag.

Gathered rows are written nowhere where a ragged region takes them. In training bags stay PyTorch's.
"""

from __future__ import annotations

from math import inf
from operator import getitem

import torch
from torch import fx

from tilestream.graph.nodes import argument, arguments, aten, value
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.given_bounds import MOST_FEATURES, MOST_ROWS, Bounds
from tilestream.graph.rewrites.insert import call, cast, size
from tilestream.graph.rewrites.settings import APART, Settings
from tilestream.graph.sizes import hint, settled
from tilestream.graph.sums import DTYPES

SUM, MEAN, MAX = 0, 1, 2


@each(aten._embedding_bag, aten._embedding_bag_forward_only)
def open_bags(node: fx.Node, settings: Settings) -> tuple[fx.Node | None, ...] | None:
    """Bags become gathers and reductions over bounds. Others say why not."""
    if settings.sums is None or not node.users:
        return None
    if (why := why_not(node)) is not None:
        node.meta[APART] = f"an EmbeddingBag {why}"
        return None
    made = _Bag(node).result()
    made.meta["val"] = node.meta["val"][0]
    return made, None, None, None


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
    """A bag, and what is inserted for it: ``counted`` is 1 for each index that counts, 0 for padding, float32
    [indices]; None where all count."""

    def __init__(self, node: fx.Node) -> None:
        self.node = node
        self.weight, self.indices, self.offsets = arguments(node)[:3]
        self.bounds = self._bounds()
        padding = argument(node, 8, "padding_idx", -1)
        self.counted = None
        if padding != -1:
            self.counted = cast(node, call(node, aten.ne.Scalar, self.indices, padding), torch.float32)

    def _bounds(self) -> Bounds:
        """As PyTorch's kernel, which takes the last bag to the end whatever the last offset says."""
        node, offsets = self.node, self.offsets
        if argument(node, 7, "include_last_offset", False):
            offsets = call(node, aten.slice.Tensor, offsets, 0, 0, -1)
        return Bounds.joined(node, [offsets, None], size(node, self.indices))

    def _kept(self, rows: fx.Node) -> fx.Node:
        """``rows``, and 0 in the place of padding, whatever is there; a mask of floats may be saved for a region."""
        if self.counted is None:
            return rows
        mask = self.bounds.wide(cast(self.node, self.counted, rows.meta["val"].dtype), 2)
        return call(self.node, aten.threshold_backward.default, rows, mask, 0)

    def _counts(self) -> fx.Node:
        """Rows of each bag that count, float32 [bags, 1]."""
        bounds = self.bounds
        return bounds.lengths(2) if self.counted is None else bounds.wide(bounds.reduced(self.counted), 2)

    def result(self) -> fx.Node:
        node, bounds = self.node, self.bounds
        mode, shares = argument(node, 4, "mode", SUM), argument(node, 6, "per_sample_weights")
        rows = call(node, aten.embedding.default, self.weight, self.indices)
        if isinstance(shares, fx.Node):
            rows = call(node, aten.mul.Tensor, rows, bounds.wide(shares, 2))
        if mode != MAX:
            total = bounds.reduced(self._kept(rows))
            if mode != MEAN:
                return total
            return bounds.divided(total, call(node, aten.clamp_min.default, self._counts(), 1.0))
        if self.counted is None:
            return bounds.reduced(rows, "max")
        counts = call(node, aten.gt.Scalar, bounds.wide(self.counted, 2), 0.0)
        most = bounds.reduced(call(node, aten.where.ScalarOther, counts, rows, -inf), "max")
        some = call(node, aten.gt.Scalar, self._counts(), 0.0)
        return call(node, aten.where.ScalarOther, some, most, 0.0)
