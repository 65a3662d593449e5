"""Products of batches by one matrix as products of rows.

PyTorch 2.11 has a linear whose rows do not lie one behind the other, as over the tokens of images whose channels lie
last, as a product of batches with the weight expanded; later ones copy the rows. Only of rows is it a layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tilestream.graph.nodes import RESHAPES, aten, is_view, packet, value
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.sizes import same_size


@each(aten.bmm)
def fold_batches(node: fx.Node, _: Settings) -> fx.Node | None:
    """``bmm(x, expanded)`` as a product of all rows of ``x``, copied where they lie otherwise."""
    weight, x = _expanded(node.args[1]), _unexpanded(node.args[0])
    if weight is None or (rows := value(x)) is None:
        return None
    batches, count = rows.shape[:2]
    if not isinstance(count, int) and not isinstance(batches, int):
        return None
    if not rows.is_contiguous():
        x = call(node, aten.clone.default, x, memory_format=torch.contiguous_format)
    depth, features = weight.meta["val"].shape
    made = call(node, aten.mm.default, call(node, aten.view.default, x, [-1, depth]), weight)
    return call(
        node, aten.view.default, made, [-1, count, features] if isinstance(count, int) else [batches, -1, features]
    )


def _expanded(node: Any) -> fx.Node | None:
    """The matrix that a value of three dimensions repeats, if it is a view of one."""
    fake = value(node)
    if fake is None or fake.dim() != 3 or fake.stride(0) != 0 or same_size(fake.shape[0], 1):
        return None
    while isinstance(node, fx.Node) and is_view(node):
        node = node.args[0]
        found = value(node)
        if found is not None and found.dim() == 2:
            same = all(map(same_size, found.shape, fake.shape[1:])) and found.stride() == fake.stride()[1:]
            return node if same else None
    return None


def _unexpanded(node: Any) -> Any:
    """What a view of the same shape shows."""
    while isinstance(node, fx.Node) and packet(node) in (aten.expand, *RESHAPES):
        before, after = value(node.args[0]), value(node)
        if before is None or after is None or before.shape != after.shape:
            break
        node = node.args[0]
    return node
