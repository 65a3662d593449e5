"""ReLU and GELU as epilogues of a library's product, for the layers beside regions that are too wide for a pipeline.

Inductor leaves ``relu(addmm(...))`` to a library's product and a kernel of its own that reads and writes the result
once more: 53 us of 130 on an H200 for 32,768 rows, 1024 features. cuBLASLt has both as epilogues, which ATen calls
``_addmm_activation``. So has a 1 x 1 convolution, which is a linear over pixels: 10 us of 15 for 6,272 pixels, 256 to
1024 channels.

- **ReLU** costs nothing; rounding after it and before it gives the same bits.
- **GELU** costs 2 to 16 us where a kernel of its own takes 11 to 120 (H200; 12,608 rows, 384 to 1536: 38.5 us for 31.8
  and 27). The library's is the one by tanh. It is within 4.8e-4 of the exact one, 2e-4 of a result's norm; rounding to
  bf16 costs 1.7e-3. And the product is not rounded before. So of bf16 an exact GELU is nearer to float64 by the
  epilogue than by the kernel (0.0017 and 0.0026 of the norm); of f16 it would not be.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from tilestream.graph.interaction import unpadded
from tilestream.graph.live import storage
from tilestream.graph.nodes import MATMULS, arguments, aten, behind, packet
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.operators import PADDED
from tilestream.graph.rewrites.pixels import PIXELS
from tilestream.graph.rewrites.settings import Settings

SHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
ALIGNED_BYTES = 16
"""What rows start on in the fast kernels of libraries; Inductor pads products for the same reason."""

WIDE = 512
"""Features from which a product takes longer than padding its operand: 4 bytes for every 2 * features FLOPs."""


def product_of(activation: fx.Node) -> Any:
    """What an activation is of: behind views, which rows with leading dimensions have, a linear."""
    node = behind(activation.args[0], lambda n: n.target in SHAPES and len(n.users) == 1)  # pyright: ignore
    return node if node is activation.args[0] or is_linear(node) else None


def is_epilogue(node: fx.Node) -> bool:
    """Whether a node is an activation that a product may take in. Not a GELU that Inductor would make in one kernel
    with what reads it: there it costs nothing either."""
    if node.target is not aten.gelu.default:
        return node.target is aten.relu.default
    by_tanh = node.kwargs.get("approximate", "none") == "tanh"
    return (by_tanh or node.meta["val"].dtype == torch.bfloat16) and all(map(_multiplies, node.users))


def _multiplies(reader: fx.Node) -> bool:
    """Whether Inductor makes no kernel of a reader: a product, an operator of ours, the result of the graph."""
    if reader.target in SHAPES or _is_no_copy(reader):
        return all(map(_multiplies, reader.users))
    own = isinstance(reader.target, torch._ops.OpOverload) and reader.target.namespace != "aten"
    return reader.op == "output" or packet(reader) in MATMULS or own


def _is_no_copy(node: fx.Node) -> bool:
    """Whether a clone, as a dropout of inference is, lies as what it copies: Inductor leaves it out."""
    if node.target is not aten.clone.default:
        return False
    return node.meta["val"].stride() == node.all_input_nodes[0].meta["val"].stride()


def is_of_pixels(node: Any) -> bool:
    """Whether a node is a 1 x 1 convolution as a linear over pixels, of 16-bit floats and known sizes, used once."""
    if not isinstance(node, fx.Node) or node.target is not aten.linear.default or not node.meta.get(PIXELS):
        return False
    result, depth = node.meta["val"], node.args[0].meta["val"].shape[-1]  # pyright: ignore
    known = all(isinstance(n, int) for n in (*result.shape, depth))
    aligned = known and not any(n * result.element_size() % ALIGNED_BYTES for n in (result.shape[-1], depth))
    return len(node.users) == 1 and aligned and result.dtype in (torch.bfloat16, torch.float16)


def is_linear(node: Any) -> bool:
    """Whether a node is ``addmm(vector, rows, weight)`` of 16-bit floats, used once."""
    if not isinstance(node, fx.Node) or node.target is not aten.addmm.default:
        return False
    if len(node.users) != 1 or node.kwargs or len(node.args) != 3 or not isinstance(node.args[0], fx.Node):
        return False
    vector, result = node.args[0].meta["val"], node.meta["val"]
    return vector.dim() == 1 and vector.shape[0] == result.shape[1] and result.dtype in (torch.bfloat16, torch.float16)


def missing_columns(product: Any) -> int | None:
    """Columns that the operands of a linear want behind their own; None where its activation is left to Inductor."""
    weight = product.args[2]
    depth, features = weight.meta["val"].shape
    if not isinstance(features, int) or not isinstance(depth, int):
        return None
    in_16_bytes = ALIGNED_BYTES // product.meta["val"].element_size()
    missing = -depth % in_16_bytes
    pads = features >= WIDE and weight.target is aten.t.default
    return None if features % in_16_bytes or (missing and not pads) else missing


def with_epilogues(nodes: Iterable[fx.Node]) -> dict[str, tuple[fx.Node, fx.Node]]:
    """Of ``nodes``, the products that take their activation in, each with that, by its name."""
    inside = dict.fromkeys(nodes)
    found: dict[str, tuple[fx.Node, fx.Node]] = {}
    for node in inside:
        product = product_of(node) if is_epilogue(node) else None
        taken = is_of_pixels(product) or (is_linear(product) and missing_columns(product) is not None)
        if taken and product in inside:
            found[node.name] = product, node
    return found


def fuse_activations(graph: fx.Graph, settings: Settings) -> int:
    """Replace every activation of a 16-bit ``addmm`` that has no other user; how many were.

    Rows of other than a multiple of 16 bytes are padded with zeros where the product is wide, and left alone where not.
    """
    taken = with_epilogues(graph.nodes).values() if settings.library_epilogues else ()
    for product, activation in taken:
        (_fuse_pixels if is_of_pixels(product) else _fuse)(product, activation)
    return len(taken)


def _fused(product: fx.Node, activation: fx.Node, *operands: fx.Node) -> fx.Node:
    """The product with its activation, where the graph inserts."""
    is_gelu = activation.target is aten.gelu.default
    return call(product, aten._addmm_activation.default, *operands, use_gelu=is_gelu)


def _fuse_pixels(product: fx.Node, activation: fx.Node) -> None:
    """The library's epilogue adds a vector in any case: zeros, where the convolution has no bias."""
    x, weight, *bias = product.args
    result = product.meta["val"]
    with product.graph.inserting_before(activation):
        vector = next((b for b in bias if b is not None), None)
        if vector is None:
            vector = call(product, aten.full.default, [result.shape[-1]], 0.0, dtype=result.dtype, device=result.device)
        rows = call(product, aten.reshape.default, x, [-1, weight.meta["val"].shape[-1]])  # pyright: ignore
        fused = _fused(product, activation, vector, rows, call(product, aten.t.default, weight))  # pyright: ignore
        activation.replace_all_uses_with(call(activation, aten.reshape.default, fused, list(result.shape)))


def _fuse(product: fx.Node, activation: fx.Node) -> None:
    bias, rows, weight = arguments(product)
    missing = missing_columns(product)
    with product.graph.inserting_before(product):
        if missing:
            (given,), depth = weight.all_input_nodes, weight.meta["val"].shape[0]
            wide = unpadded(rows)  # an interaction's rows end in zeros as they are
            if wide is not None and wide.meta["val"].shape[1] == depth + missing:
                rows, (given,) = wide, _padded(product, [given], depth + missing)
            else:
                rows, given = _padded(product, [rows, given], depth + missing)
            weight = call(product, aten.t.default, given)
        fused = _fused(product, activation, bias, rows, weight)
    product.replace_all_uses_with(fused)
    activation.replace_all_uses_with(activation.all_input_nodes[0])


def _padded(product: fx.Node, matrices: Sequence[fx.Node], columns: int) -> list[fx.Node]:
    """Each with columns of zeros behind its own: those that are given by one kernel of ours. What the graph computes
    Inductor pads where it makes it."""
    given = [m for m in matrices if _is_given(m)]
    both = call(product, PADDED, given, columns) if given else None
    return [
        call(product, operator.getitem, both, given.index(m))
        if m in given
        else call(product, aten.constant_pad_nd.default, m, [0, columns - m.meta["val"].shape[1]])
        for m in matrices
    ]


def _is_given(node: fx.Node) -> bool:
    """Whether a node is the user's tensor, or a view of it."""
    return storage(node).op in ("placeholder", "get_attr")
