"""The operator that attention over few keys becomes: what it means, on any device.

``cuda.short_attention`` has it as a kernel.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tilestream.graph.masked.op import empty_result
from tilestream.graph.own import operator


def short_attention(
    query: Tensor, key: Tensor, value: Tensor, added: Sequence[Tensor], scale: float, safe: bool
) -> Tensor:
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ key.to(wide).mT * scale
    for term in added:
        scores = scores + term.to(wide).repeat(len(query) // len(term), 1, 1, 1)
    weights = scores.softmax(-1)
    if safe:
        weights = weights.masked_fill((scores == float("-inf")).all(-1, keepdim=True), 0.0)
    return empty_result(query, by_token=True).copy_(weights @ value.to(wide))


SHORT = operator(short_attention, lambda query, *_: empty_result(query, by_token=True), "short_attention:attention")
"""Of ``query`` [B, H, Q, F], ``key`` and ``value`` [B, H, K, F].

``added``: each [period or 1, H or 1, Q or 1, K or 1]; sequence ``b`` has that of ``b % period``.
``safe``: rows of minus infinity alone give zeros, else no number.
"""
