"""Products of complex numbers as arithmetic of real ones, which Inductor fuses; it generates no complex code.

A rotary embedding written with ``view_as_complex``, as Llama's reference has it, is a cast, a complex product by ATen
and another cast where it stays complex, six launches for queries and keys; and real it is part of the kernels around.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from tilestream.graph.nodes import aten, value
from tilestream.graph.rewrites.each import each
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.settings import Settings


@each(aten.view_as_real)
def multiply_reals(real: fx.Node, _: Settings) -> fx.Node | None:
    """Replace every ``view_as_real(a * b)`` of complex64 tensors that has no other user.

    ``(p + qi)(c + di)`` is ``(p, q) c + (q, p) (-d, d)``: pairs, the same pairs the other way round, and no
    concatenation. Sums are of the same fp32 products as ATen's.
    """
    (product,) = real.all_input_nodes
    return _multiplied(real, product.all_input_nodes) if _is_product(product) else None


def _is_product(node: Any) -> bool:
    """Whether a node multiplies two complex64 tensors and is used once."""
    if node.target is not aten.mul.Tensor or len(node.users) != 1:
        return False
    return all(v is not None and v.dtype == torch.complex64 for v in map(value, node.args))


def _multiplied(real: fx.Node, numbers: Sequence[fx.Node]) -> fx.Node:
    pairs, turn = (_pairs(real, a) for a in (*numbers, *numbers)[:2])
    cosine, sine = (call(real, aten.slice.Tensor, turn, -1, i, i + 1) for i in (0, 1))
    second = call(real, aten.arange.default, 2, dtype=torch.float32, device=real.meta["val"].device)
    sign = call(real, aten.sub.Tensor, call(real, aten.mul.Tensor, second, 2), 1)
    other = call(real, aten.flip.default, pairs, [-1])
    along = call(real, aten.mul.Tensor, pairs, cosine)
    across = call(real, aten.mul.Tensor, call(real, aten.mul.Tensor, other, sine), sign)
    return call(real, aten.add.Tensor, along, across)


def _pairs(real: fx.Node, number: fx.Node) -> fx.Node:
    """A complex tensor as fp32 pairs ``[..., 2]``."""
    if number.target is aten.view_as_complex.default:
        return number.all_input_nodes[0]
    return call(real, aten.view_as_real.default, number)
