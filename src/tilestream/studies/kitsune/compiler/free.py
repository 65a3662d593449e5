"""What an fx node costs nothing for: views, conversions and partial updates belong to who reads or writes them."""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import fx

from tilestream.graph.costs.table import CONVERSIONS, UPDATES
from tilestream.graph.nodes import ASSERTIONS, VIEWS, packet

FOLDED = "tilestream_folded"
"""Key in ``meta`` of a node that belongs to its neighbour: True where it stands for its operand, else it is nothing."""


def is_free(node: fx.Node) -> bool:
    """Whether the node computes nothing of its own."""
    if node.op != "call_function":
        return False
    if FOLDED in node.meta:
        return True
    kind = packet(node)
    return node.target is operator.getitem or kind in VIEWS or kind in CONVERSIONS or kind in UPDATES


def is_operation(node: fx.Node) -> bool:
    """Whether the node computes or moves something."""
    return node.op == "call_function" and not is_free(node) and packet(node) not in ASSERTIONS


def result(node: fx.Node) -> str:
    """The name of what a node makes; a result of several is ``name.0``, ``name.1``."""
    if node.target is operator.getitem and is_operation(node.all_input_nodes[0]):
        return f"{node.all_input_nodes[0].name}.{node.args[1]}"
    return node.name


def users(node: fx.Node) -> Iterator[fx.Node]:
    """The nodes that compute with what ``node`` makes, looking through views, and the graph's output."""
    for user in node.users:
        if is_free(user):
            yield from users(user)
        elif packet(user) not in ASSERTIONS:
            yield user


def base(node: fx.Node) -> fx.Node:
    """The node behind views of one operand."""
    while node.op == "call_function" and not is_operation(node):
        node = node.all_input_nodes[0]
    return node
