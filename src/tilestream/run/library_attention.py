"""Which of PyTorch's fused attentions runs where several can: timed once a shape.

PyTorch takes cuDNN's on Hopper. That one sets memory first, and leaves 5 us of gaps around a kernel that takes four for
BERT-base on 128 tokens: the flash attention that PyTorch has besides is one launch.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
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

Layout = tuple[tuple[int, ...], tuple[int, ...]]
"""Sizes and strides."""


@dataclass(frozen=True)
class Kind:
    """All that decides how long an attention without a mask takes: of query, key and value sizes and strides."""

    query: Layout
    key: Layout
    value: Layout
    dtype: str
    causal: bool
    scale: float


def kind_of(node: fx.Node) -> Kind | None:
    """What an attention is, if flash attention may do it; else None."""
    if node.target is not CUDNN:
        return None
    given = given_to(node)
    fakes = [value(given[name]) for name in ("query", "key", "value")]
    if any(given.get(name) is not None for name in MASKS) or given.get("dropout_p"):
        return None
    layouts: list[Layout] = []
    for fake in fakes:
        if fake is None or fake.dim() != 4 or not all(isinstance(n, int) for n in (*fake.shape, *fake.stride())):
            return None
        layouts.append((tuple(fake.shape), tuple(fake.stride())))
    (batch, heads, queries, features), positions = layouts[0][0], layouts[1][0][2]
    fits = features <= MOST_FEATURES and features % 8 == 0 and batch * heads * queries * positions <= MOST_SCORES
    if not fits or any(shape[:2] != (batch, heads) or shape[3] != features for shape, _ in layouts):
        return None
    scale = given.get("scale") or features**-0.5
    return Kind(*layouts, str(fakes[0].dtype), bool(given.get("is_causal")), scale)  # pyright: ignore


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


FLASH_ATTENTION = Alternative("flash attention", "attention stays cuDNN's", kind_of, _ours, _replace)
"""In the place of cuDNN's, wherever it is faster."""
