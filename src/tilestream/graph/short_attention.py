"""The operators that attention over few keys and its gradients become: what they mean, on any device.

``cuda.short_attention`` has them as kernels.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilestream.graph.masked.op import empty_result
from tilestream.graph.own import operator
from tilestream.kernels.operators import few_keys_gradients
from tilestream.kernels.operators.few_keys import Attention


def short_attention(
    query: Tensor, key: Tensor, value: Tensor, added: Sequence[Tensor], scale: float, safe: bool
) -> Tensor:
    weights = _weights(query, key, added, scale, safe)
    return empty_result(query, by_token=True).copy_(weights @ value.to(weights.dtype))


def _weights(query: Tensor, key: Tensor, added: Sequence[Tensor], scale: float, safe: bool) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).mT * scale
    for term in added:
        scores = scores + term.to(wide).repeat(len(query) // len(term), 1, 1, 1)
    weights = scores.softmax(-1)
    return weights.masked_fill((scores == float("-inf")).all(-1, keepdim=True), 0.0) if safe else weights


SHORT = operator(short_attention, lambda query, *_: empty_result(query, by_token=True), "short_attention:attention")
"""Of ``query`` [B, H, Q, F], ``key`` and ``value`` [B, H, K, F].

``added``: each [period or 1, H or 1, Q or 1, K or 1]; sequence ``b`` has that of ``b % period``.
``safe``: rows of minus infinity alone give zeros, else no number.
"""


def short_attention_gradients(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    added: Sequence[Tensor],
    scale: float,
    safe: bool,
    summed: bool,
    each: int,
) -> tuple[Tensor, Tensor, Tensor]:
    weights = _weights(query, key, added, scale, safe)
    given, by_query, by_key, by_value = (t.to(weights.dtype) for t in (gradient, query, key, value))
    weighted = weights * (given @ by_value.mT)
    scores = weighted - weights * weighted.sum(-1, keepdim=True)
    made = (scores @ by_key * scale, scores.mT @ by_query * scale, weights.mT @ given)
    firsts, lasts, sums = gradients_of(query, key, added, summed, each)
    is_long = sums.dim() > scores.dim()
    for to, result in zip(parted(firsts, sums.zero_()[0] if is_long else lasts), made, strict=True):
        to.copy_(result)
    if summed:
        sums.zero_()[0] = scores.sum(0)
    return firsts, lasts, sums


def gradients_of(
    query: Tensor, key: Tensor, added: Sequence[Tensor], summed: bool, each: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Empty results of ``short_attention_gradients``."""
    (batches, heads, queries, features), period = query.shape, max([1, *map(len, added)])
    a = Attention(batches, heads, queries, key.shape[2], features, period=period)
    firsts, lasts, sums = few_keys_gradients.shapes(a, each, summed)
    wide = torch.promote_types(query.dtype, torch.float32)
    return query.new_empty(firsts), query.new_empty(lasts), query.new_empty(sums, dtype=wide)


def parted(firsts: Tensor, lasts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of query, key and value, each [B, H, Q or K, F], of two results."""
    rows = [*firsts.unbind(2), *(lasts.unbind(2) if firsts.shape[2] == 1 else ())]
    first, second, third = (t.transpose(1, 2) for t in rows)
    return first, second, third


GRADIENTS = operator(
    short_attention_gradients,
    lambda _, query, key, __, added, ___, ____, summed, each: gradients_of(query, key, added, summed, each),
    "short_attention:gradients",
)
"""Of ``gradient`` [B, H, Q, F], of the result of ``SHORT``, whose other arguments are given too.

Two tensors hold the gradients of query, key and value: [B, Q, 3, H, F] and nothing where there are as many queries as
keys, else [B, Q, 1, H, F] and [B, K, 2, H, F]. The third, [parts, H, Q, K] in fp32, adds up over its first to the
gradient of what is added to all sequences, if it is ``summed``; a part has ``each`` sequences at most. Of more queries
than ``few_keys_gradients.MOST`` the second is empty, and the third, [parts, B, K, 2, H, F], adds up to it.
"""
