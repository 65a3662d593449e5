"""Attention of a token a sequence as a kernel of ours, where it is faster than the library's: timed once a shape."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from tilestream.graph.nodes import value
from tilestream.graph.own import operator
from tilestream.graph.rewrites.shared_keys import given_to, mask_given, operands_of, scale_of
from tilestream.kernels.operators.few_queries import FEATURES, MOST_QUERIES
from tilestream.run.attention import Alternative, fake_of

aten = torch.ops.aten

MOST_POSITIONS = 4096
"""A head of keys has one CTA, which takes longer than the library's over more of them."""


def few_queries(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    return torch.nn.functional.scaled_dot_product_attention(query, key, value, mask, scale=scale).contiguous()


FEW_QUERIES = operator(few_queries, lambda query, *_: query.new_empty(query.shape), "few_queries:attention")


def fits(node: fx.Node) -> bool:
    """Whether an attention is one of few queries: one head, and all else that its kernel needs."""
    given = given_to(node)
    query, key, values = map(value, operands_of(node))
    if query is None or key is None or values is None or given.get("is_causal") or given.get("dropout_p"):
        return False
    sizes = (*query.shape, *key.shape, *values.shape)
    if len(sizes) != 12 or not all(isinstance(n, int) for n in sizes) or key.shape != values.shape:
        return False
    heads, one, queries, features = query.shape
    has_kernel = one == 1 and queries <= MOST_QUERIES and features in FEATURES and key.shape[2] <= MOST_POSITIONS
    if not has_kernel or query.dtype not in (torch.bfloat16, torch.float16) or list(key.shape[:2]) != [heads, 1]:
        return False
    mask = mask_given(given)
    fake = None if mask is None else value(mask)
    return mask is None or (fake is not None and fake.dtype == query.dtype and _is_alike(fake))


def _is_alike(mask: Tensor) -> bool:
    """Whether all queries of a head have the same row of a mask."""
    if mask.dim() == 2:
        return mask.shape[0] == 1
    return mask.dim() == 4 and (mask.shape[2] == 1 or mask.stride(2) == 0)


def _ours(do: Any, node: fx.Node, query: Any, key: Any, values: Any, mask: Any = None) -> Any:
    if mask is not None and fake_of(mask).dim() == 2:
        mask = do(aten.reshape.default, mask, [1, 1, 1, -1])
    return do(FEW_QUERIES, query, key, values, mask, scale_of(node))


STREAMED = Alternative("attention of few queries", "attention goes to the library", fits, _ours, on_reference=True)
"""Our kernel, in graphs behind ``share_keys``."""
