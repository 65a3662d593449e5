"""Concatenations as Inductor compiles them.

Parts that are products write where they belong: the rows of such a result are as far apart as the concatenation is
wide, so that odd widths take kernels for single elements. What reads a concatenation element by element computes it
itself, and products are then copied like other parts.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import fx

from tilestream.graph.costs import flops
from tilestream.graph.costs.table import Kind, row
from tilestream.graph.costs.work import operands
from tilestream.graph.live import tensor_bytes
from tilestream.graph.nodes import packet, readers, value
from tilestream.graph.sizes import hint
from tilestream.plan.values import Moved, producer, reads

PART = 7.5
"""Lane instructions of an element for each part: a kernel asks of every part whether an element is its own. Fitted to
four kernels in whole models of ``benchmarks/results/whole``: NeRF's 319 features, DLRM's 479, the edges of
MeshGraphNets and GraphCast."""
LINE = 16


def is_cat(node: fx.Node) -> bool:
    return row(packet(node)).kind is Kind.CAT


def lanes(node: fx.Node) -> float:
    """Instructions of an element beside one; none of two parts of whole lines, nor where a part's own kernel writes it
    in its place."""
    parts = [t for t in operands(node) if t.dim()]
    makers = [made for read in reads(node) if (made := producer(read.node)) is not None]
    if any(flops.of_node(made) > 0 or row(packet(made)).kind is Kind.NORM for made in makers):
        return 0.0
    whole = all(hint(t.shape[-1]) * t.element_size() % LINE == 0 for t in parts)
    return 0.0 if whole and len(parts) < 3 else PART * len(parts)


def pitch(node: fx.Node) -> int:
    """Elements from one row of a product to the next where it is written as a part of a concatenation; 0 elsewhere."""
    for joined in _readers(node):
        made = value(joined)
        if is_cat(joined) and made is not None and made.dim() and node in _in_place(joined):
            return hint(made.shape[-1])
    return 0


def without_products(nodes: Sequence[fx.Node], touched: Moved) -> Moved:
    """``touched`` without what products wrote into the concatenations among ``nodes``."""
    placed = {node: _in_place(node) for node in nodes if is_cat(node)}
    inside = {part.name for parts in placed.values() for part in parts}
    less = {node.name: float(sum(map(tensor_bytes, parts))) for node, parts in placed.items()}
    reads_ = tuple((name, amount) for name, amount in touched.reads if name not in inside)
    writes = tuple((name, max(1.0, amount - less.get(name, 0.0))) for name, amount in touched.writes)
    return Moved(reads_, writes) if inside else touched


def _in_place(joined: fx.Node) -> list[fx.Node]:
    """The products among the parts of a concatenation of features whose readers are no elementwise operators."""
    made, dim = value(joined), joined.args[1] if len(joined.args) > 1 else joined.kwargs.get("dim", 0)
    if made is None or not isinstance(dim, int) or not made.dim() or dim % made.dim() != made.dim() - 1:
        return []
    if all(row(packet(user)).kind is Kind.ELEMENTWISE for user in _readers(joined)):
        return []
    parts = (producer(read.node) for read in reads(joined))
    return [part for part in parts if part is not None and flops.of_node(part) > 0]


def _readers(node: fx.Node) -> list[fx.Node]:
    """The operators that read a value, views of it looked through."""
    return [user for user in readers(node) if user.op == "call_function"]
