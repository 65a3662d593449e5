"""ReLU as the epilogue of a library's product, for the layers beside regions that are too wide for a pipeline.

Inductor leaves ``relu(addmm(...))`` to a library's product and a kernel of its own that reads and writes the result
once more: 53 us of 130 on an H200 for 32,768 rows, 1024 features. cuBLASLt has ReLU as an epilogue, which ATen calls
``_addmm_activation``; rounding after it and before it gives the same bits.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from tilestream.graph.interaction import unpadded

aten = torch.ops.aten
ALIGNED_BYTES = 16
"""What rows start on in the fast kernels of libraries; Inductor pads products for the same reason."""

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
    from torch._inductor import config

    if any(patches.get(name, getattr(config, name)) for name in ("max_autotune", "max_autotune_gemm")):
        return 0
    fused = 0
    for relu in graph.graph.find_nodes(op="call_function", target=aten.relu.default):
        product = relu.args[0]
        if _is_linear(product):
            fused += _fuse(graph.graph, product, relu)
    if fused:
        graph.graph.eliminate_dead_code()
        graph.graph.lint()
        graph.recompile()
    return fused


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


def _fuse(graph: fx.Graph, product: fx.Node, relu: fx.Node) -> bool:
    bias, rows, transposed = product.all_input_nodes
    (weight,) = transposed.all_input_nodes
    features, depth = weight.meta["val"].shape
    if not isinstance(features, int) or not isinstance(depth, int):
        return False
    in_16_bytes = ALIGNED_BYTES // product.meta["val"].element_size()
    missing = -depth % in_16_bytes
    if features % in_16_bytes or (missing and features < WIDE):
        return False
    with graph.inserting_before(relu):
        if missing:
            wide = unpadded(rows)  # an interaction's rows end in zeros as they are
            if wide is None or wide.meta["val"].shape[1] != depth + missing:
                wide = graph.call_function(aten.constant_pad_nd.default, (rows, [0, missing]))
            rows, weight = wide, graph.call_function(aten.constant_pad_nd.default, (weight, [0, missing]))
            transposed = graph.call_function(aten.t.default, (weight,))
        fused = graph.call_function(aten._addmm_activation.default, (bias, rows, transposed))
    fused.meta = dict(relu.meta)
    relu.replace_all_uses_with(fused)
    return True
