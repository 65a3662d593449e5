"""Rewrites of joint and backward graphs that leave less to save and less to compute.

``dW = dY.T cat(A, B)`` is ``cat(dY.T A, dY.T B)``: parts of what was joined are saved anyway, or are inputs, so that
the joined rows need not be. Part of ``dY W``'s columns is ``dY`` times part of ``W``'s.
"""

from __future__ import annotations

from torch import fx

from tilestream.graph.nodes import argument, aten, is_result, keeps_features, packet, value
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.settings import Settings
from tilestream.graph.sizes import hint, settled


@each(aten.mm)
def split_joined(node: fx.Node, settings: Settings) -> fx.Node | None:
    """``mm(t(dY), cat([A, B], -1))`` of at least ``least_rows`` becomes a product for each part, joined."""
    left, right = node.args
    parts, rows = _parts(right) if isinstance(right, fx.Node) and node.users else (), value(right)
    if not parts or rows is None or hint(rows.shape[0]) < settings.least_rows or rows.element_size() != 2:
        return None
    flat = [_flat(part) for part in parts]
    products = [call(node, aten.mm.default, left, part) for part in flat]
    return call(node, aten.cat.default, products, 1)


def _parts(node: fx.Node) -> tuple[fx.Node, ...]:
    """What rows were joined of, where a matrix is rows that were joined along their features."""
    if packet(node) in (aten.view, aten.reshape, aten._unsafe_view) and isinstance(node.args[0], fx.Node):
        return _parts(node.args[0]) if keeps_features(node) else ()
    made = value(node)
    if packet(node) is not aten.cat or made is None:
        return ()
    dim, parts = argument(node, 1, "dim", 0), argument(node, 0, "tensors")
    if not isinstance(dim, int) or dim % made.dim() != made.dim() - 1 or not isinstance(parts, list | tuple):
        return ()
    given = tuple(p for p in parts if isinstance(p, fx.Node))
    fakes = [value(p) for p in given]
    if len(given) != len(parts) or any(f is None or f.dim() != made.dim() or f.dtype != made.dtype for f in fakes):
        return ()
    return given


def _flat(part: fx.Node) -> fx.Node:
    fake = part.meta["val"]
    if fake.dim() == 2:
        return part
    return call(part, aten.reshape.default, part, [-1, fake.shape[-1]])


def narrow_products(graph: fx.Graph, _: Settings) -> int:
    """A product of which one slice of columns is used becomes a product with that slice of the weight; how many did.

    Each use may have a slice of its own, as in a graph in its normal form.
    """
    products = [n for n in graph.nodes if packet(n) is aten.mm]
    alike = [node for node in products if len(set(map(_columns, node.users))) == 1]
    # A slice that is returned has the strides of the wider rows, which whoever called sees.
    return sum(narrow_product(node) for node in alike if not any(map(is_result, node.users)))


def narrow_product(node: fx.Node) -> bool:
    """Multiply by no columns of the weight before the first or behind the last that slices of a product take; whether
    slices are all that is used, and something was left out, or they are one."""
    weight, columns = node.args[1], settled(node.meta["val"].shape[1])
    parts = {user: _columns(user) for user in node.users}
    used = [bounds for bounds in parts.values() if bounds is not None]
    if not used or len(used) < len(parts) or not isinstance(columns, int) or not isinstance(weight, fx.Node):
        return False
    start, end = min(first for first, _ in used), max(last for _, last in used)
    if end - start == columns and len(set(used)) > 1:
        return False
    like = next(iter(parts))
    with node.graph.inserting_before(node.next):
        weight = call(node, aten.slice.Tensor, weight, 1, start, end)
        narrow = call(like, aten.mm.default, node.args[0], weight)
    for part, (first, last) in zip(parts, used, strict=True):
        made = narrow
        if (first, last) != (start, end):
            with node.graph.inserting_after(narrow):
                made = call(part, aten.slice.Tensor, narrow, 1, first - start, last - start)
        part.replace_all_uses_with(made)
    return True


def _columns(node: fx.Node) -> tuple[int, int] | None:
    """Which columns a slice of a matrix takes."""
    if packet(node) is not aten.slice or len(node.args) != 4 or node.kwargs:
        return None
    _, dim, first, last = node.args
    if dim not in (1, -1) or not isinstance(first, int) or not isinstance(last, int):
        return None
    columns = node.all_input_nodes[0].meta["val"].shape[1]
    first, last = (x + columns if x < 0 else min(x, columns) for x in (first, last))
    return (first, last) if first < last else None
