"""Columns that a graph repeats over the features before it computes on them: the operators broadcast them as well.

Autograd writes the derivative of ``mean(x, -1)`` as ``expand(g) / n``: rows made of a column, which a region would have
to hold as rows, and which are no tile op.
"""

from __future__ import annotations

from torch import fx

from tilestream.graph.nodes import aten, is_result, packet, value
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.sizes import same_shape, same_size, same_sizes


@each(aten.add, aten.sub, aten.mul, aten.div)
def put_off_expands(node: fx.Node, _: Settings) -> fx.Node | None:
    """Products and sums of a repeated column take the column. Those of it alone are columns too."""
    tensors = node.all_input_nodes
    columns = [_column(n) for n in tensors]
    if value(node) is None or not any(columns) or any(value(n) is None for n in tensors):
        return None
    if len(tensors) == 2 and all(_same(node, n) for n in tensors):
        old, column = next((n, c) for n, c in zip(tensors, columns, strict=True) if c is not None)
        if value(column).dtype == value(old).dtype:  # pyright: ignore
            node.replace_input_with(old, column)
            return node
    elif len(tensors) == 1 and node.args[0] is tensors[0] and not is_result(node):  # an expand has strides of 0
        (column,), (repeated,) = columns, tensors
        narrow = call(node, node.target, column, *node.args[1:], **node.kwargs)
        return call(node, aten.expand.default, narrow, *repeated.args[1:])
    return None


def _same(a: fx.Node, b: fx.Node) -> bool:
    """Whether two nodes are known to have one shape."""
    one, other = value(a), value(b)
    return one is not None and other is not None and same_shape(one, other)


def _column(node: fx.Node) -> fx.Node | None:
    """The column that a node repeats over its last dimension."""
    if packet(node) is not aten.expand or not isinstance(node.args[0], fx.Node):
        return None
    before, after = value(node.args[0]), value(node)
    if before is None or after is None or before.dim() != after.dim() or before.dim() < 2:
        return None
    if not same_size(before.shape[-1], 1) or same_size(after.shape[-1], 1):
        return None
    return node.args[0] if same_sizes(before.shape[:-1], after.shape[:-1]) else None
