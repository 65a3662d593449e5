"""``scaled_dot_product_attention`` over sequences of several dimensions, or without heads, in Dynamo's graph.

PyTorch's fused kernels take [sequences, heads, tokens, features], and of other ranks it multiplies in float32. Windows
of timm's Twins have a dimension of their own.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch import fx

from tilestream.graph.attention_masks import SDPA, example_of, give
from tilestream.graph.nodes import argument


def give_ranks(gm: fx.GraphModule) -> int:
    """Let every attention on a GPU that has no mask be of rank 4; of how many it was changed.

    Args:
        gm: Dynamo's graph, with ``example_value`` in its nodes' ``meta``; changed in place.
    """
    made = sum(_give(node) for node in list(gm.graph.nodes) if node.op == "call_function" and node.target is SDPA)
    if made:
        gm.recompile()
    return made


def _give(node: fx.Node) -> bool:
    names = ("query", "key", "value")
    given: list[Any] = [argument(node, at, name) for at, name in enumerate(names)]
    fakes = [x for n in given if (x := example_of(n)) is not None]
    if len(fakes) < 3 or argument(node, 3, "attn_mask") is not None or any(f.device.type != "cuda" for f in fakes):
        return False
    shapes = [tuple(f.shape) for f in fakes]
    first = shapes[0][:-2]
    known = all(isinstance(n, int) for shape in shapes for n in shape)
    if len(first) in (0, 2) or not known or any(shape[:-2] != first for shape in shapes):
        return False
    sequences, heads = (first[0], 1) if len(first) == 1 else (prod(first[:-1]), first[-1])
    with node.graph.inserting_before(node):
        flat = [_reshaped(n, (sequences, heads, *s[-2:])) for n, s in zip(given, shapes, strict=True)]
    give(node, None, **dict(zip(names, flat, strict=True)))
    with node.graph.inserting_after(node):
        back = _reshaped(node, (*first, shapes[0][-2], shapes[2][-1]))
    node.replace_all_uses_with(back, delete_user_cb=lambda user: user is not back)
    back.meta["example_value"] = node.meta["example_value"]
    return True


def _reshaped(node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
    return node.graph.call_function(torch.reshape, (node, shape))
