"""Rows that bulk copies cannot address, as copies that they can: with zeros behind them, beside such weights."""

from __future__ import annotations

from torch import fx

from tilestream.graph.nodes import arguments, aten, packet
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.settings import APART, Settings

ALIGNED = "copied with columns of zeros, so that rows begin on 16 bytes: nothing streams"
PER_16_BYTES = 8
"""Elements of 16 bits."""
PRODUCTS = (aten.mm, aten.addmm)


@each(*PRODUCTS)
def align_rows(node: fx.Node, settings: Settings) -> fx.Node | None:
    """Pad rows and weight of a product that ``settings.aligns`` names. Products of the same rows read one copy."""
    if settings.aligns is None or not settings.aligns(node):
        return None
    *bias, rows, turned = arguments(node)
    copies = [u for u in rows.users if _is_copy(u) and u < node]
    padded = copies[0] if copies else _padded(node, rows)
    node.args = (*bias, padded, call(node, aten.t.default, _padded(node, turned.args[0])))
    return node


@each(*PRODUCTS)
def unalign_rows(node: fx.Node, _: Settings) -> fx.Node | None:
    """Undo ``align_rows`` where no region took the product."""
    *bias, rows, turned = node.args
    if not isinstance(rows, fx.Node) or not isinstance(turned, fx.Node) or not _is_copy(rows):
        return None
    (weight,) = turned.all_input_nodes
    node.args = (*bias, rows.args[0], call(node, aten.t.default, weight.args[0]))
    return node


def missing(columns: int) -> int:
    """Columns of 16 bits that rows of ``columns`` lack to begin on 16 bytes."""
    return -columns % PER_16_BYTES


def _padded(node: fx.Node, matrix: fx.Node) -> fx.Node:
    made = call(node, aten.constant_pad_nd.default, matrix, [0, missing(matrix.meta["val"].shape[1])])
    made.meta[APART] = ALIGNED
    return made


def _is_copy(node: fx.Node) -> bool:
    return packet(node) is aten.constant_pad_nd and node.meta.get(APART) == ALIGNED
