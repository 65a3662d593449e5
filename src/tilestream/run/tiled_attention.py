"""Attention without a mask, or causal, as our kernel of masked attention, where it is faster than the library's.

cuDNN's sets memory first and leaves gaps: six microseconds around the ten that a decoder's layer of 512 tokens takes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from tilestream.graph.masked.sites import FEATURES, LEAST_QUERIES
from tilestream.graph.nodes import value
from tilestream.graph.rewrites.shared_keys import given_to, mask_given, operands_of, scale_of
from tilestream.kernels.parts.pairs import EVERY, band
from tilestream.run.attention import Alternative
from tilestream.run.library_attention import features_of
from tilestream.run.masked_attention import MASKED  # with its kernel


def fits(node: fx.Node) -> bool:
    """Whether a library's attention may be ours: each query keeps all keys, or those up to its own."""
    given, (query, key, _) = given_to(node), map(value, operands_of(node))
    features = features_of(node, shared=True)
    if features not in FEATURES or mask_given(given) is not None or query is None or key is None:
        return False
    square = query.shape[2] == key.shape[2]
    narrow = query.dtype in (torch.bfloat16, torch.float16)
    return narrow and query.shape[2] >= LEAST_QUERIES and (square or not given.get("is_causal")) and scale_of(node) > 0


def _ours(do: Any, node: fx.Node, query: Any, key: Any, values: Any) -> Any:
    heads_apart, tokens_apart = node.meta["val"][0].stride()[1:3]
    kept = band(EVERY, 0 if given_to(node).get("is_causal") else EVERY)
    by_token = tokens_apart > heads_apart
    return do(MASKED, query, key, values, [], [], kept.text, [], [1, 1], scale_of(node), by_token)


TILED_ATTENTION = Alternative("attention by tiles of keys", "attention stays a library's", fits, _ours)
"""Our kernel, in the place of whichever library's there is."""
