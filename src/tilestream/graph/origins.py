"""What a node is under other leading dimensions, or without columns that it was padded by."""

from __future__ import annotations

from torch import fx

from tilestream.graph.lowering import Steps
from tilestream.graph.nodes import aten, packet, value

_SAME = (aten.detach, aten.alias, aten.view, aten.reshape, aten._unsafe_view)


def origin_of(node: fx.Node) -> fx.Node:
    """What a node is, under other leading dimensions."""
    while (before := same_as(node)) is not None:
        node = before
    return node


def same_as(node: fx.Node) -> fx.Node | None:
    """What a node is a view of, if that has the same columns."""
    if packet(node) not in _SAME or not isinstance(node.args[0], fx.Node):
        return None
    before, after = value(node.args[0]), value(node)
    if before is None or after is None or before.shape[-1:] != after.shape[-1:]:
        return None
    return node.args[0]


def unpadded(node: fx.Node) -> fx.Node:
    """What a node is without columns of zeros behind it."""
    is_pad = packet(node) is aten.constant_pad_nd and len(node.args[1]) == 2 and node.args[1][0] == 0  # pyright: ignore
    return origin_of(node.args[0]) if is_pad and isinstance(node.args[0], fx.Node) else origin_of(node)


def bare(steps: Steps) -> Steps:
    """Steps that change more than leading dimensions."""
    return tuple(step for step in steps if step[0] != "flatten")
