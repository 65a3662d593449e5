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

from tilestream.aten.nodes import packet
from tilestream.capture import hint

aten = torch.ops.aten

_WHOLE_LAYERS = tuple(
    getattr(aten, name)
    for name in (
        "linear",
        "mkldnn_rnn_layer",
        "_cudnn_rnn",
        "_transformer_encoder_layer_fwd",
        "_native_multi_head_attention",
    )
    if hasattr(aten, name)
)
"""Operators that torch has no formula for: every row meets every weight. Attention scores inside are left out."""


def of_call(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> int:
    """FLOPs of one call of an ATen operator packet; its tensors may be fake, and their sizes symbolic."""
    from torch.utils.flop_counter import flop_registry

    if operator in _WHOLE_LAYERS:
        tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)]
        rows = prod(hint(d) for d in tensors[0].shape[:-1])
        return 2 * rows * sum(prod(hint(d) for d in w.shape) for w in tensors[1:] if w.dim() == 2)
    formula = flop_registry.get(operator)
    return hint(formula(*args, **kwargs, out_val=result)) if formula is not None else 0


def of_node(node: fx.Node) -> int:
    """FLOPs of a node of an ATen graph whose nodes have fake values."""
    args, kwargs = tree_map_only(fx.Node, lambda n: n.meta.get("val"), (node.args, node.kwargs))
    return of_call(packet(node), args, kwargs, node.meta.get("val"))
