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
from torch import Tensor, fx

from tilestream.graph.nodes import value
from tilestream.graph.rewrites.insert import call
from tilestream.graph.rewrites.shared_keys import given_to, mask_given, operands_of, take_over
from tilestream.run.attention import Alternative

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
    features = _features(node, (CUDNN,), shared=True)
    return features % 8 == 0 and 0 < features <= MOST_FEATURES and mask_given(given) is None


def _features(node: fx.Node, instead_of: tuple[Any, ...], shared: bool = False) -> int:
    """Of a head of an attention by one of some kernels, of known sizes and not too long to time; else 0.

    Args:
        shared: whether several heads of queries may share one of keys.
    """
    if node.target not in instead_of or given_to(node).get("dropout_p"):
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


def _flash(node: fx.Node, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    given = given_to(node)
    return FLASH(query, key, value, 0.0, bool(given.get("is_causal")), scale=given.get("scale"))[0]


def _replace_by_flash(node: fx.Node) -> bool:
    given = given_to(node)
    return _put(node, FLASH, *operands_of(node), 0.0, bool(given.get("is_causal")), scale=given.get("scale"))


def _put(node: fx.Node, kernel: Any, *args: Any, **kwargs: Any) -> bool:
    """Whether it was: the result must lie as it lay before, since views of it are taken."""
    last = node.prev
    with node.graph.inserting_before(node):
        made = call(node, kernel, *args, **kwargs)
        result: Any = call(node, operator.getitem, made, 0)
    if result.meta["val"].stride() != node.meta["val"][0].stride():
        while node.prev is not last:
            node.graph.erase_node(node.prev)
        return False
    take_over(node, result)
    return True


def fits_efficient(node: fx.Node) -> bool:
    """Whether memory-efficient attention may do what flash attention or cuDNN's does: with what is added to scores, if
    that is of the same dtype, and known in all sizes."""
    given = given_to(node)
    mask, query, features = mask_given(given), value(given["query"]), _features(node, (CUDNN, FLASH))
    if not features or features % 8 or query is None:
        return False
    fake = value(mask)
    return mask is None or (
        fake is not None
        and fake.dtype == query.dtype
        and all(isinstance(n, int) for n in (*fake.shape, *fake.stride()))
    )


def _added(mask: Any, sizes: list[int], do: Callable[..., Any]) -> Any:
    """A mask as the kernel reads it: expanded, in rows that start on 16 bytes. ``do`` calls an operator."""
    fake = mask if isinstance(mask, Tensor) else mask.meta["val"]
    keys = fake.shape[-1]
    if fake.stride(-1) != 1 or any(n % ALIGNED for n in fake.stride()[:-1]):
        if keys == 1:  # a column for all keys
            mask, keys = do(aten.expand.default, mask, [*fake.shape[:-1], sizes[3]]), sizes[3]
        padded = do(aten.constant_pad_nd.default, mask, [0, -keys % ALIGNED or ALIGNED], 0.0)
        mask = do(aten.slice.Tensor, padded, -1, 0, keys)
    return do(aten.expand.default, mask, sizes)


def added_to(node: fx.Node, added: fx.Node, sizes: list[int]) -> fx.Node:
    """What is added to scores ``[B, H, Q, K]``, as the memory-efficient kernel reads it; nodes are like ``node``."""
    return _added(added, sizes, lambda op, *args: call(node, op, *args))


def _sizes(query: Tensor, key: Tensor) -> list[int]:
    return [*query.shape[:3], key.shape[2]]


def _efficient(node: fx.Node, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None = None) -> Tensor:
    given = given_to(node)
    added = None if mask is None else _added(mask, _sizes(query, key), lambda op, *args: op(*args))
    causal = bool(given.get("is_causal"))
    return EFFICIENT(query, key, value, added, False, 0.0, causal, scale=given.get("scale"))[0]


def _replace_by_efficient(node: fx.Node) -> bool:
    given, operands = given_to(node), operands_of(node)
    added = mask_given(given)
    last = node.prev
    if added is not None:
        sizes = _sizes(*(n.meta["val"] for n in operands[:2]))
        with node.graph.inserting_before(node):
            added = added_to(node, added, sizes)
    causal = bool(given.get("is_causal"))
    made = _put(node, EFFICIENT, *operands, added, False, 0.0, causal, scale=given.get("scale"))
    while not made and node.prev is not last:
        node.graph.erase_node(node.prev)
    return made


FLASH_ATTENTION = Alternative("flash attention", "attention stays cuDNN's", fits, _flash, _replace_by_flash)
"""In the place of cuDNN's, wherever it is faster."""
EFFICIENT_ATTENTION = Alternative(
    "memory-efficient attention", "attention stays another library's", fits_efficient, _efficient, _replace_by_efficient
)
"""In the place of either: of windows of 49 tokens of 32 with a bias cuDNN's takes twice its time."""
