"""ReLU as the epilogue of a library's product, for the layers beside regions that are too wide for a pipeline.

Inductor leaves ``relu(addmm(...))`` to a library's product and a kernel of its own that reads and writes the result
once more: 53 us of 130 on an H200 for 32,768 rows, 1024 features. cuBLASLt has ReLU as an epilogue, which ATen calls
``_addmm_activation``; rounding after it and before it gives the same bits. So has a 1 x 1 convolution, which is a
linear over pixels: 10 us of 15 for 6,272 pixels, 256 to 1024 channels.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from tilestream.graph.interaction import unpadded
from tilestream.graph.live import storage
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.operators import PADDED
from tilestream.graph.rewrites.pixels import PIXELS
from tilestream.graph.rewrites.settings import Settings

aten = torch.ops.aten
SHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
ALIGNED_BYTES = 16
"""What rows start on in the fast kernels of libraries; Inductor pads products for the same reason."""

WIDE = 512
"""Features from which a product takes longer than padding its operand: 4 bytes for every 2 * features FLOPs."""


def product_of(relu: fx.Node) -> Any:
    """What a ReLU is of: behind views, which rows with leading dimensions have, a linear."""
    node: Any = relu.args[0]
    while isinstance(node, fx.Node) and node.target in SHAPES and len(node.users) == 1:
        node = node.args[0]
    return node if node is relu.args[0] or is_linear(node) else None


def is_of_pixels(node: Any) -> bool:
    """Whether a node is a 1 x 1 convolution as a linear over pixels, of 16-bit floats and known sizes, used once."""
    if not isinstance(node, fx.Node) or node.target is not aten.linear.default or not node.meta.get(PIXELS):
        return False
    result, depth = node.meta["val"], node.args[0].meta["val"].shape[-1]  # pyright: ignore
    known = all(isinstance(n, int) for n in (*result.shape, depth))
    aligned = known and not any(n * result.element_size() % ALIGNED_BYTES for n in (result.shape[-1], depth))
    return len(node.users) == 1 and aligned and result.dtype in (torch.bfloat16, torch.float16)


def is_linear(node: Any) -> bool:
    """Whether a node is ``addmm(vector, rows, t(weight))`` of 16-bit floats, used once."""
    if not isinstance(node, fx.Node) or node.target is not aten.addmm.default:
        return False
    if len(node.users) != 1 or node.kwargs or len(node.args) != 3:
        return False
    bias, _, weight = node.args
    if not isinstance(bias, fx.Node) or not isinstance(weight, fx.Node) or weight.target is not aten.t.default:
        return False
    vector, result = bias.meta["val"], node.meta["val"]
    return vector.dim() == 1 and vector.shape[0] == result.shape[1] and result.dtype in (torch.bfloat16, torch.float16)


def missing_columns(product: Any) -> int | None:
    """Columns that the operands of a linear want behind their own; None where its ReLU is left to Inductor."""
    (weight,) = product.all_input_nodes[2].all_input_nodes
    features, depth = weight.meta["val"].shape
    if not isinstance(features, int) or not isinstance(depth, int):
        return None
    in_16_bytes = ALIGNED_BYTES // product.meta["val"].element_size()
    missing = -depth % in_16_bytes
    return None if features % in_16_bytes or (missing and features < WIDE) else missing


def with_relu(nodes: Iterable[fx.Node]) -> dict[str, tuple[fx.Node, fx.Node]]:
    """Of ``nodes``, the products that take their ReLU in, each with that, by its name."""
    inside = dict.fromkeys(nodes)
    found: dict[str, tuple[fx.Node, fx.Node]] = {}
    for relu in inside:
        product = product_of(relu) if relu.target is aten.relu.default else None
        taken = is_of_pixels(product) or (is_linear(product) and missing_columns(product) is not None)
        if taken and product in inside:
            found[relu.name] = product, relu
    return found


def fuse_relus(graph: fx.Graph, settings: Settings) -> int:
    """Replace every ``relu`` of a 16-bit ``addmm`` that has no other user; how many were.

    Rows of other than a multiple of 16 bytes are padded with zeros where the product is wide, and left alone where not.
    """
    taken = with_relu(graph.nodes).values() if settings.library_epilogues else ()
    for product, relu in taken:
        (_fuse_pixels if is_of_pixels(product) else _fuse)(product, relu)
    return len(taken)


def _fuse_pixels(product: fx.Node, relu: fx.Node) -> None:
    """The library's epilogue adds a vector in any case: zeros, where the convolution has no bias."""
    x, weight, *bias = product.args
    result = product.meta["val"]
    with product.graph.inserting_before(relu):
        vector = next((b for b in bias if b is not None), None)
        if vector is None:
            vector = call(relu, aten.full.default, [result.shape[-1]], 0.0, dtype=result.dtype, device=result.device)
        rows = call(relu, aten.reshape.default, x, [-1, weight.meta["val"].shape[-1]])  # pyright: ignore
        fused = call(relu, aten._addmm_activation.default, vector, rows, call(relu, aten.t.default, weight))
        relu.replace_all_uses_with(call(relu, aten.reshape.default, fused, list(result.shape)))


def _fuse(product: fx.Node, relu: fx.Node) -> None:
    bias, rows, transposed = product.all_input_nodes
    (weight,) = transposed.all_input_nodes
    depth, missing = weight.meta["val"].shape[1], missing_columns(product)
    with product.graph.inserting_before(product):
        if missing:
            wide = unpadded(rows)  # an interaction's rows end in zeros as they are
            if wide is not None and wide.meta["val"].shape[1] == depth + missing:
                rows, (weight,) = wide, _padded(product, [weight], depth + missing)
            else:
                rows, weight = _padded(product, [rows, weight], depth + missing)
            transposed = call(product, aten.t.default, weight)
        fused = call(product, aten._addmm_activation.default, bias, rows, transposed)
    product.replace_all_uses_with(fused)
    relu.replace_all_uses_with(relu.all_input_nodes[0])


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
