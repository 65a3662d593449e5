"""Which of PyTorch's fused attentions runs where several can: timed once a shape.

PyTorch takes cuDNN's on Hopper. That one sets memory first, and leaves 5 us of gaps around a kernel that takes four for
BERT-base on 128 tokens: the flash attention that PyTorch has besides is one launch. Over a few short sequences with a
bias the memory-efficient one is faster than either.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from tilestream.graph.nodes import value
from tilestream.graph.rewrites.shared_keys import given_to, mask_given, operands_of
from tilestream.run.attention import Alternative, fake_of

aten = torch.ops.aten
CUDNN = aten._scaled_dot_product_cudnn_attention.default
FLASH = aten._scaled_dot_product_flash_attention.default
EFFICIENT = aten._scaled_dot_product_efficient_attention.default

MOST_FEATURES = 256
ALIGNED = 8
"""Elements in a row of what is added to scores, as the memory-efficient kernel reads it."""
MOST_SCORES = 2**24
"""Of all heads: where there are more, a few microseconds are nothing, and float64 takes much memory."""


def fits(node: fx.Node) -> bool:
    """Whether flash attention may do what cuDNN's does."""
    given = given_to(node)
    features = features_of(node, shared=True)
    return node.target is CUDNN and features % 8 == 0 and 0 < features <= MOST_FEATURES and mask_given(given) is None


def features_of(node: fx.Node, shared: bool = False) -> int:
    """Of a head of a library's attention without dropout, of known sizes and not too long to time; else 0.

    Args:
        shared: whether several heads of queries may share one of keys.
    """
    if given_to(node).get("dropout_p"):
        return 0
    fakes = [value(n) for n in operands_of(node)]
    known = [f for f in fakes if f is not None and all(isinstance(n, int) for n in (*f.shape, *f.stride()))]
    if len(known) < 3 or any(f.dim() != 4 for f in known):
        return 0
    (batch, heads, queries, features), positions = known[0].shape, known[1].shape[2]
    groups = known[1].shape[1]
    alike = all((*f.shape[:2], f.shape[3]) == (batch, groups, features) for f in known[1:])
    fitting = alike and (groups == heads or (shared and heads % groups == 0))
    return features if fitting and batch * heads * queries * positions <= MOST_SCORES else 0


def _flash(do: Any, node: fx.Node, query: Any, key: Any, values: Any) -> Any:
    given = given_to(node)
    made = do(FLASH, query, key, values, 0.0, bool(given.get("is_causal")), scale=given.get("scale"))
    return do(operator.getitem, made, 0)


def fits_efficient(node: fx.Node) -> bool:
    """Whether memory-efficient attention may do what flash attention or cuDNN's does: with what is added to scores, if
    that is of the same dtype, and known in all sizes."""
    given = given_to(node)
    mask, query, features = mask_given(given), value(given["query"]), features_of(node)
    if node.target not in (CUDNN, FLASH) or not features or features % 8 or query is None:
        return False
    fake = value(mask)
    return mask is None or (
        fake is not None
        and fake.dtype == query.dtype
        and all(isinstance(n, int) for n in (*fake.shape, *fake.stride()))
    )


def added_to(mask: Any, sizes: list[int], do: Callable[..., Any]) -> Any:
    """What is added to scores ``[B, H, Q, K]``, as the memory-efficient kernel reads it: expanded, in rows that start
    on 16 bytes. ``do`` calls an operator."""
    fake = fake_of(mask)
    keys = fake.shape[-1]
    if fake.stride(-1) != 1 or any(n % ALIGNED for n in fake.stride()[:-1]):
        if keys == 1:  # a column for all keys
            mask, keys = do(aten.expand.default, mask, [*fake.shape[:-1], sizes[3]]), sizes[3]
        padded = do(aten.constant_pad_nd.default, mask, [0, -keys % ALIGNED or ALIGNED], 0.0)
        mask = do(aten.slice.Tensor, padded, -1, 0, keys)
    return do(aten.expand.default, mask, sizes)


def _efficient(do: Any, node: fx.Node, query: Any, key: Any, values: Any, mask: Any = None) -> Any:
    given, sizes = given_to(node), [*fake_of(query).shape[:3], fake_of(key).shape[2]]
    added = None if mask is None else added_to(mask, sizes, do)
    causal = bool(given.get("is_causal"))
    made = do(EFFICIENT, query, key, values, added, False, 0.0, causal, scale=given.get("scale"))
    return do(operator.getitem, made, 0)


FLASH_ATTENTION = Alternative("flash attention", "attention stays cuDNN's", fits, _flash)
"""In the place of cuDNN's, wherever it is faster."""
EFFICIENT_ATTENTION = Alternative(
    "memory-efficient attention", "attention stays another library's", fits_efficient, _efficient
)
"""In the place of either: of windows of 49 tokens of 32 with a bias cuDNN's takes twice its time."""
