"""Which ReLUs a library takes in as the epilogue of its product: linears of 16-bit rows, and 1 x 1 convolutions."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import fx

from tilestream.graph.pixels import PIXELS

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
