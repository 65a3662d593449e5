"""Gathers of an element for each place that take whole rows: by one index, as those of edges are read elsewhere."""

from __future__ import annotations

from torch import fx

from tilestream.graph.nodes import aten, value
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.sizes import same_sizes
from tilestream.graph.sums import repeated


@each(aten.gather)
def take_rows(node: fx.Node, _: Settings) -> fx.Node | None:
    """``index_select(x, 0, index)`` for ``gather(x, 0, index expanded)``, which the gradients of maxima are full of."""
    table, index, result = value(node.args[0]), repeated(node.args[2]), value(node)
    if table is None or index is None or result is None or node.args[1] not in (0, -table.dim()):
        return None
    if not same_sizes(table.shape[1:], result.shape[1:]):
        return None
    return call(node, aten.index_select.default, node.args[0], 0, index)
