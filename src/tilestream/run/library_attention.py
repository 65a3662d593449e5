"""Which of PyTorch's fused attentions runs where several can: timed once a shape.

PyTorch takes cuDNN's on Hopper. That one sets memory first, and leaves 5 us of gaps around a kernel that takes four for
BERT-base on 128 tokens: the flash attention that PyTorch has besides is one launch.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, fx

from tilestream.graph.nodes import value
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.shared_keys import MASKS, given_to, take_over
from tilestream.run.attention import Alternative

aten = torch.ops.aten
CUDNN = aten._scaled_dot_product_cudnn_attention.default
FLASH = aten._scaled_dot_product_flash_attention.default

MOST_FEATURES = 256
MOST_SCORES = 2**24
"""Of all heads: where there are more, a few microseconds are nothing, and float64 takes much memory."""


def fits(node: fx.Node) -> bool:
    """Whether flash attention may do what cuDNN's does."""
    given = given_to(node)
    if node.target is not CUDNN or any(given.get(name) is not None for name in MASKS) or given.get("dropout_p"):
        return False
    fakes = [value(given[name]) for name in ("query", "key", "value")]
    known = [f for f in fakes if f is not None and all(isinstance(n, int) for n in (*f.shape, *f.stride()))]
    if len(known) < 3 or any(f.dim() != 4 for f in known):
        return False
    (batch, heads, queries, features), positions = known[0].shape, known[1].shape[2]
    alike = all((*f.shape[:2], f.shape[3]) == (batch, heads, features) for f in known)
    in_reach = features <= MOST_FEATURES and features % 8 == 0
    return alike and in_reach and batch * heads * queries * positions <= MOST_SCORES


def _ours(node: fx.Node, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    given = given_to(node)
    return FLASH(query, key, value, 0.0, bool(given.get("is_causal")), scale=given.get("scale"))[0]


def _replace(node: fx.Node) -> bool:
    """Whether it was: the result must lie as it lay before, since views of it are taken."""
    given = given_to(node)
    operands = [given[name] for name in ("query", "key", "value")]
    with node.graph.inserting_before(node):
        made = call(node, FLASH, *operands, 0.0, bool(given.get("is_causal")), scale=given.get("scale"))
        result: Any = call(node, operator.getitem, made, 0)
    before = node.meta["val"][0]
    if result.meta["val"].stride() != before.stride():
        for new in (result, made):
            new.graph.erase_node(new)
        return False
    take_over(node, result)
    return True


FLASH_ATTENTION = Alternative("flash attention", "attention stays cuDNN's", fits, _ours, _replace)
"""In the place of cuDNN's, wherever it is faster."""
