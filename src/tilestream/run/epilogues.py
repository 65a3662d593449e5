"""ReLU as the epilogue of a library's product, for the layers beside regions that are too wide for a pipeline.

Inductor leaves ``relu(addmm(...))`` to a library's product and a kernel of its own that reads and writes the result
once more: 53 us of 130 on an H200 for 32,768 rows, 1024 features. cuBLASLt has ReLU as an epilogue, which ATen calls
``_addmm_activation``; rounding after it and before it gives the same bits. So has a 1 x 1 convolution, which is a
linear over pixels: 10 us of 15 for 6,272 pixels, 256 to 1024 channels.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from tilestream.graph.interaction import unpadded
from tilestream.graph.pixels import PIXELS
from tilestream.graph.settled import settle

aten = torch.ops.aten
SHAPES = (aten.view.default, aten._unsafe_view.default, aten.reshape.default)
ALIGNED_BYTES = 16
"""What rows start on in the fast kernels of libraries; Inductor pads products for the same reason."""

TOGETHER = 1 << 21
"""Elements of rows up to which one kernel pads them and the weight. It writes more slowly than one of rows alone, and
saves a launch: 479 columns, 2,048 rows, 2.9 us for 2.3 and 1.4; 32,768 rows, 22.0 for 15.5 and 2.0 (H200)."""

WIDE = 512
"""Features from which a product takes longer than padding its operand: 4 bytes for every 2 * features FLOPs."""


def fuse(graph: fx.GraphModule, patches: Mapping[str, Any]) -> int:
    """Replace every ``relu`` of a 16-bit ``addmm`` that has no other user; how many were.

    Rows of other than a multiple of 16 bytes are padded with zeros where the product is wide, and left alone where not.
    Nothing is replaced where Inductor is asked to tune products, whose templates have epilogues of their own.

    Args:
        graph: functional ATen with ``val`` in its nodes' meta, which new nodes may lack; changed in place.
        patches: changes of Inductor's configuration for the graph.
    """
    if _tunes(patches):
        return 0
    fused = 0
    for relu in graph.graph.find_nodes(op="call_function", target=aten.relu.default):
        product = _product(relu)
        if _is_linear(product) and _missing(product) is not None:
            _fuse(graph.graph, product, relu)
            fused += 1
        elif _is_of_pixels(product):
            _fuse_pixels(graph.graph, product, relu)
            fused += 1
    if fused:
        settle(graph)
    return fused


def _tunes(patches: Mapping[str, Any]) -> bool:
    from torch._inductor import config

    return any(patches.get(name, getattr(config, name)) for name in ("max_autotune", "max_autotune_gemm"))


def would_fuse(graph: fx.GraphModule, patches: Mapping[str, Any], linears: bool = True) -> bool:
    """Whether ``fuse`` would replace a ReLU: then a graph without regions gains as well.

    Args:
        linears: whether products of rows count, and not 1 x 1 convolutions alone.
    """
    products = map(_product, graph.graph.find_nodes(op="call_function", target=aten.relu.default))
    found = (_is_of_pixels(p) or (linears and _is_linear(p) and _missing(p) is not None) for p in products)
    return not _tunes(patches) and any(found)


def _product(relu: fx.Node) -> Any:
    """What a ReLU is of: behind views, which rows with leading dimensions have, a linear."""
    node: Any = relu.args[0]
    while isinstance(node, fx.Node) and node.target in SHAPES and len(node.users) == 1:
        node = node.args[0]
    return node if node is relu.args[0] or _is_linear(node) else None


def _is_of_pixels(node: Any) -> bool:
    """Whether a node is a 1 x 1 convolution as a linear over pixels, of 16-bit floats and known sizes, used once."""
    if not isinstance(node, fx.Node) or node.target is not aten.linear.default or not node.meta.get(PIXELS):
        return False
    result, depth = node.meta["val"], node.args[0].meta["val"].shape[-1]  # pyright: ignore
    known = all(isinstance(n, int) for n in (*result.shape, depth))
    aligned = known and not any(n * result.element_size() % ALIGNED_BYTES for n in (result.shape[-1], depth))
    return len(node.users) == 1 and aligned and result.dtype in (torch.bfloat16, torch.float16)


def _fuse_pixels(graph: fx.Graph, product: fx.Node, relu: fx.Node) -> None:
    """The library's epilogue adds a vector in any case: zeros, where the convolution has no bias."""
    x, weight, *bias = product.args
    result = product.meta["val"]
    with graph.inserting_before(relu):
        vector = next((b for b in bias if b is not None), None)
        if vector is None:
            words = {"dtype": result.dtype, "device": result.device}
            vector = graph.call_function(aten.full.default, ([result.shape[-1]], 0.0), words)
        rows = graph.call_function(aten.reshape.default, (x, [-1, weight.meta["val"].shape[-1]]))  # pyright: ignore
        transposed = graph.call_function(aten.t.default, (weight,))
        fused = graph.call_function(aten._addmm_activation.default, (vector, rows, transposed))
        shown = graph.call_function(aten.reshape.default, (fused, list(result.shape)))
    shown.meta = dict(relu.meta)
    relu.replace_all_uses_with(shown)


def _is_linear(node: Any) -> bool:
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


def _missing(product: fx.Node) -> int | None:
    """Columns that the operands of a linear want behind their own; None where its ReLU is left to Inductor."""
    (weight,) = product.all_input_nodes[2].all_input_nodes
    features, depth = weight.meta["val"].shape
    if not isinstance(features, int) or not isinstance(depth, int):
        return None
    in_16_bytes = ALIGNED_BYTES // product.meta["val"].element_size()
    missing = -depth % in_16_bytes
    return None if features % in_16_bytes or (missing and features < WIDE) else missing


def _fuse(graph: fx.Graph, product: fx.Node, relu: fx.Node) -> None:
    bias, rows, transposed = product.all_input_nodes
    (weight,) = transposed.all_input_nodes
    depth, missing = weight.meta["val"].shape[1], _missing(product)
    with graph.inserting_before(product):
        if missing:
            wide = unpadded(rows)  # an interaction's rows end in zeros as they are
            if wide is not None and wide.meta["val"].shape[1] == depth + missing:
                rows, weight = wide, _padded(graph, weight, missing)
            elif _are_few(rows):
                rows, weight = _padded_together(graph, rows, weight, missing)
            else:
                rows, weight = _padded(graph, rows, missing), _padded(graph, weight, missing)
            transposed = graph.call_function(aten.t.default, (weight,))
        fused = graph.call_function(aten._addmm_activation.default, (bias, rows, transposed))
    fused.meta = dict(product.meta)
    product.replace_all_uses_with(fused)
    relu.replace_all_uses_with(relu.all_input_nodes[0])


def _are_few(rows: fx.Node) -> bool:
    size = rows.meta["val"].numel()
    return isinstance(size, int) and size <= TOGETHER


def _padded(graph: fx.Graph, node: fx.Node, missing: int) -> fx.Node:
    """With columns of zeros behind its own."""
    return graph.call_function(aten.constant_pad_nd.default, (node, [0, missing]))


def _padded_together(graph: fx.Graph, rows: fx.Node, weight: fx.Node, missing: int) -> tuple[fx.Node, fx.Node]:
    """Both padded, as parts of one tensor: a kernel in the place of two."""
    features = weight.meta["val"].shape[0]
    both = graph.call_function(aten.cat.default, ([_padded(graph, node, missing) for node in (weight, rows)],))
    first = graph.call_function(aten.slice.Tensor, (both, 0, 0, features))
    return graph.call_function(aten.slice.Tensor, (both, 0, features, sys.maxsize)), first
