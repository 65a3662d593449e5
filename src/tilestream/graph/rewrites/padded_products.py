"""Products of odd widths as wider ones, where rows are computed: zeros are written with them.

Fast kernels of libraries want rows of 16 bytes, of both operands and of the result. An MLP over 196 tokens has rows of
392: on an H200 a library's kernel for 16,384 of them and 256 features takes 13.4 us, where bytes take 4. Inductor pads
such a product by copies of its operands, and seldom finds that it pays.
"""

from __future__ import annotations

from torch import fx

from tilestream.graph.live import storage
from tilestream.graph.lying import elsewhere
from tilestream.graph.nodes import MATMULS, aten, packet, value
from tilestream.graph.rewrites.aligned_rows import missing
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.sizes import hint

LEAST_ROWS, LEAST_FEATURES = 4096, 32
"""Fewer take as long as the launch that pads the weight, 2 us; a matrix of few features is read as fast as it lies."""


@each(aten.mm, aten.addmm)
def pad_products(node: fx.Node, settings: Settings) -> fx.Node | None:
    """The product with columns of zeros behind rows and weight, and of its result those that were wanted; not where its
    readers want these one row behind the other, as whoever called does."""
    if not settings.library_epilogues or not pads(node):
        return None
    *bias, rows, weight = node.args
    depth, features = weight.meta["val"].shape  # pyright: ignore
    deeper, wider = missing(depth), missing(features)
    made = node.meta["val"]
    changed = elsewhere(node.graph, node, made.new_empty_strided(made.shape, (features + wider, 1)))
    if changed is None:
        return None
    for reader, val in changed.items():
        reader.meta["val"] = val
    if deeper:
        rows = call(node, aten.constant_pad_nd.default, rows, [0, deeper])
    lying = weight.args[0] if weight.target is aten.t.default else weight  # pyright: ignore
    turned = lying is not weight
    behind = [0, deeper, 0, wider] if turned else [0, wider, 0, deeper]
    weight = call(node, aten.constant_pad_nd.default, lying, behind)
    if turned:
        weight = call(node, aten.t.default, weight)
    if bias and wider:
        bias = [call(node, aten.constant_pad_nd.default, bias[0], [0, wider])]
    made = call(node, node.target, *bias, rows, weight)
    return call(node, aten.slice.Tensor, made, 1, 0, features) if wider else made


def pads(node: fx.Node) -> bool:
    """Whether a node is a product of many rows, that a kernel of Inductor's writes, and of odd width."""
    if packet(node) not in (aten.mm, aten.addmm) or node.kwargs:
        return False
    *bias, rows, weight = node.args
    left, right = value(rows), value(weight)
    if left is None or right is None or left.element_size() != 2 or not left.is_floating_point():
        return False
    depth, features = right.shape
    known = isinstance(depth, int) and isinstance(features, int) and hint(left.shape[0]) >= LEAST_ROWS
    if not known or min(depth, features) < LEAST_FEATURES or not (missing(depth) or missing(features)):
        return False
    vector = value(bias[0]) if bias else None
    return (not bias or (vector is not None and vector.dim() == 1)) and (not missing(depth) or _is_written(rows))


def _is_written(node: object) -> bool:
    """Whether a kernel of Inductor's makes a value, which writes zeros beside it as well."""
    made = storage(node) if isinstance(node, fx.Node) else None
    if made is None or made.op in ("placeholder", "get_attr"):
        return False
    return packet(made) not in MATMULS and getattr(made.target, "namespace", "aten") == "aten"
