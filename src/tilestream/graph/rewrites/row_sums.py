"""What sums over rows read: of the gradients of a norm's weight and bias, rows that are in memory anyway.

``sum(g x^)`` reads a product that nobody else wants. Left to a region, it would leave as rows of fp32; so the sum gets
operators of its own, back to rows of 16 bits, columns and inputs, and Inductor makes one kernel of them.
"""

from __future__ import annotations

import torch
from torch import fx

from tilestream.graph.gradients import aliases
from tilestream.graph.nodes import MATMULS, aten, is_view, packet, sums_rows, value
from tilestream.graph.operators import ELEMENTWISE
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.settings import APART, Settings
from tilestream.graph.sizes import same_size
from tilestream.ir.ways import reached

_MOST = 16
"""Operators that a sum gets at most: from there on it reads what the region leaves."""
_CHEAP = {*ELEMENTWISE, aten._to_copy, torch.ops.prims.convert_element_type}


@each(aten.sum)
def copy_sums_operands(node: fx.Node, _: Settings) -> fx.Node | None:
    """Give every sum over rows its own copy of the wide arithmetic before it, which is in no region."""
    chain = _chain(node.args[0]) if sums_rows(node) and isinstance(node.args[0], fx.Node) else []
    if not chain or sum(not is_view(n) for n in chain) > _MOST:
        return None
    copies: dict[fx.Node, fx.Node] = {}
    for one in chain:
        copies[one] = node.graph.node_copy(one, lambda n: copies.get(n, n))
        copies[one].meta[APART] = "only a sum over rows reads it"
    node.replace_input_with(chain[-1], copies[chain[-1]])
    return node


def _chain(last: fx.Node) -> list[fx.Node]:
    """Wide arithmetic that ends in ``last``, in the order of the graph."""
    found = reached(filter(_wide, [last]), lambda n: filter(_wide, n.all_input_nodes))
    return [n for n in last.graph.nodes if n in found]


def _wide(node: fx.Node) -> bool:
    """Whether a node is arithmetic on rows in fp32, more than a column, that no product wants in memory."""
    made = value(node)
    if made is None or made.dtype != torch.float32 or not made.dim() or same_size(made.shape[-1], 1):
        return False
    if any(packet(u) in MATMULS for alias in aliases(node) for u in alias.users):
        return False
    return packet(node) in _CHEAP or (is_view(node) and packet(node) is not aten.lift_fresh_copy)
