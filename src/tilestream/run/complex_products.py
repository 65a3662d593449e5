"""Products of complex numbers as arithmetic of real ones, which Inductor fuses; it generates no complex code.

A rotary embedding written with ``view_as_complex``, as Llama's reference has it, is a cast, a complex product by ATen
and another cast where it stays complex, six launches for queries and keys; and real it is part of the kernels around.
"""

from __future__ import annotations

import torch
from torch import fx

from tilestream.graph.settled import settle

aten = torch.ops.aten


def make_real(graph: fx.GraphModule) -> int:
    """Replace every ``view_as_real(a * b)`` of complex64 tensors that has no other user; how many were.

    ``(p + qi)(c + di)`` is ``(p, q) c + (q, p) (-d, d)``: pairs, the same pairs the other way round, and no
    concatenation. Sums are of the same fp32 products as ATen's.

    Args:
        graph: functional ATen with ``val`` in its nodes' meta, which new nodes lack; changed in place.
    """
    made = 0
    for real in graph.graph.find_nodes(op="call_function", target=aten.view_as_real.default):
        product = real.args[0]
        if _is_product(product):
            _replace(graph.graph, product, real)
            made += 1
    if made:
        settle(graph)
    return made


def _is_product(node: fx.Node) -> bool:
    """Whether a node multiplies two complex64 tensors and is used once."""
    if node.target is not aten.mul.Tensor or len(node.users) != 1:
        return False
    values = [a.meta.get("val") if isinstance(a, fx.Node) else None for a in node.args]
    return all(isinstance(v, torch.Tensor) and v.dtype == torch.complex64 for v in values)


def _replace(graph: fx.Graph, product: fx.Node, real: fx.Node) -> None:
    device = real.meta["val"].device
    with graph.inserting_before(real):
        pairs, turn = (_pairs(graph, a) for a in product.all_input_nodes * (3 - len(product.all_input_nodes)))
        cosine, sine = (graph.call_function(aten.slice.Tensor, (turn, -1, i, i + 1)) for i in (0, 1))
        second = graph.call_function(aten.arange.default, (2,), {"dtype": torch.float32, "device": device})
        sign = graph.call_function(aten.sub.Tensor, (graph.call_function(aten.mul.Tensor, (second, 2)), 1))
        other = graph.call_function(aten.flip.default, (pairs, [-1]))
        along = graph.call_function(aten.mul.Tensor, (pairs, cosine))
        across = graph.call_function(aten.mul.Tensor, (graph.call_function(aten.mul.Tensor, (other, sine)), sign))
        turned = graph.call_function(aten.add.Tensor, (along, across))
    turned.meta = dict(real.meta)
    real.replace_all_uses_with(turned)


def _pairs(graph: fx.Graph, number: fx.Node) -> fx.Node:
    """A complex tensor as fp32 pairs ``[..., 2]``."""
    if number.target is aten.view_as_complex.default:
        (pairs,) = number.all_input_nodes
        return pairs
    return graph.call_function(aten.view_as_real.default, (number,))
