"""Gathers of an element for each place that take whole rows: by one index, as those of edges are read elsewhere."""

from __future__ import annotations

from torch import fx

from tilestream.graph.nodes import aten, value
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.sizes import same_size
from tilestream.graph.sums import repeated


def take_rows(graph: fx.Graph, _: Settings) -> int:
    """Replace ``gather(x, 0, index expanded)`` by ``index_select(x, 0, index)``; how many were. The gradients of
    maxima are full of them."""
    made = 0
    for node in graph.find_nodes(op="call_function", target=aten.gather.default):
        table, index = value(node.args[0]), repeated(node.args[2])
        result = value(node)
        if table is None or index is None or result is None or node.args[1] not in (0, -table.dim()):
            continue
        if not all(same_size(a, b) for a, b in zip(table.shape[1:], result.shape[1:], strict=True)):
            continue
        with graph.inserting_before(node):
            rows = call(node, aten.index_select.default, node.args[0], 0, index)
        node.replace_all_uses_with(rows)
        made += 1
    return made
