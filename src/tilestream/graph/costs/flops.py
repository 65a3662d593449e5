"""FLOPs of ATen operators, from shapes: two a multiply-add of every matrix product, convolution and attention.

The formulas are torch's own (``torch.utils.flop_counter``). Element-wise operators, normalisations, reductions and
copies count 0: they are counted as operators only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves, tree_map_only

from tilestream.graph.convolutions import convolution
from tilestream.graph.nodes import aten, packet
from tilestream.graph.sizes import hint

_WEIGHTS = {
    getattr(aten, name): positions
    for name, positions in {
        "linear": (1,),
        "mkldnn_rnn_layer": (1, 2),
        "_cudnn_rnn": (1,),
        "_transformer_encoder_layer_fwd": (3, 5, 14, 16),
        "_native_multi_head_attention": (5, 7),
    }.items()
    if hasattr(aten, name)
}
"""Operators that torch has no formula for: every row of the first operand meets every matrix at these positions.
Attention scores inside of them are left out."""


def of_call(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """FLOPs of one call of an ATen operator packet; its tensors may be fake, and their sizes symbolic."""
    from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count

    if operator in _WEIGHTS:
        weights = tree_leaves([args[p] for p in _WEIGHTS[operator]])
        rows = prod(hint(d) for d in args[0].shape[:-1])
        return 2 * rows * sum(prod(hint(d) for d in w.shape) for w in weights if w.dim() == 2)
    if operator is aten._grouped_mm:  # groups are parts of one of its sizes, unless both operands have one for them
        left, right = args[:2]
        groups = hint(left.shape[0]) if left.dim() == right.dim() == 3 else 1
        return 2 * groups * hint(left.shape[-2]) * hint(left.shape[-1]) * hint(right.shape[-1])
    if operator is convolution:
        return 2 * prod(hint(d) for d in result.shape[:-1]) * prod(hint(d) for d in args[1].shape)
    formula = flop_registry.get(operator)
    if str(operator).startswith("aten._scaled_dot_product") and "backward" not in str(operator):
        # heads of keys may be fewer than those of queries, which torch's formula takes for a mistake
        query, key, values = args[:3]
        pairs = prod(hint(d) for d in query.shape[:-1]) * hint(key.shape[-2])
        return 2 * pairs * (hint(key.shape[-1]) + hint(values.shape[-1]))
    if formula is None and str(operator).startswith("aten._scaled_dot_product"):  # the CPU's, which torch leaves out
        return sdpa_backward_flop_count(*([hint(d) for d in x.shape] for x in args[:4] if isinstance(x, torch.Tensor)))
    return hint(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def of_node(node: fx.Node) -> int:
    """FLOPs of a node of an ATen graph whose nodes have fake values."""
    args, kwargs = tree_map_only(fx.Node, lambda n: n.meta.get("val"), (node.args, node.kwargs))
    return of_call(packet(node), args, kwargs, node.meta.get("val"))
