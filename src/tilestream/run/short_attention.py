"""Attention over few keys as a kernel of ours, where it is faster than the library's: timed once a shape."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx

from tilestream.devices import Device
from tilestream.graph.nodes import value
from tilestream.graph.rewrites.shared_keys import given_to, mask_given, operands_of, scale_of
from tilestream.graph.short_attention import SHORT
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.operators.few_keys import Attention
from tilestream.kernels.operators.short_attention import counts, has_kernel
from tilestream.run.attention import Alternative

NAME = "attention over few keys"


def takes(query: Tensor, key: Tensor, values: Tensor, terms: int, scale: float) -> bool:
    """Whether there is a kernel for operands like these, [batches, heads, rows, features] of known sizes, and for so
    many terms added to scores."""
    shapes = [tuple(t.shape) for t in (query, key, values)]
    if any(len(s) != 4 or not all(isinstance(n, int) for n in s) for s in shapes) or not scale > 0:
        return False
    (batches, heads, queries, features), keys = shapes[0], shapes[1][2]
    alike = shapes[1] == shapes[2] == (batches, heads, keys, features) and batches * heads * queries > 0
    return alike and query.dtype in (torch.bfloat16, torch.float16) and has_kernel(sizes(query, keys, 1, terms))


def predicted_us(query: Tensor, keys: int, terms: Sequence[Sequence[int]], device: Device) -> float:
    """Of the kernel; ``terms``: the shapes of what is added."""
    period = max([1, *(shape[0] for shape in terms)])
    return counts(sizes(query, keys, period, len(terms)), terms, device).us


def sizes(query: Tensor, keys: int, period: int, terms: int) -> Attention:
    """Of an attention, whose sequences have the same added every ``period``."""
    batches, heads, queries, features = query.shape
    return Attention(batches, heads, queries, keys, features, DTYPES[query.dtype], period, terms)


def fits(node: fx.Node) -> bool:
    """Whether a library's attention may be ours."""
    given = given_to(node)
    known = [value(n) for n in operands_of(node)]
    if any(fake is None for fake in known) or given.get("is_causal") or given.get("dropout_p"):
        return False
    query, key, values = known
    mask = mask_given(given)
    if not takes(query, key, values, int(mask is not None), scale_of(node)):  # pyright: ignore[reportArgumentType]
        return False
    fake, whole = value(mask), (*query.shape[:3], key.shape[2])  # pyright: ignore[reportOptionalMemberAccess]
    return mask is None or (
        fake is not None
        and fake.dtype == query.dtype  # pyright: ignore[reportOptionalMemberAccess]
        and fake.dim() == 4
        and all(n in (1, full) for n, full in zip(fake.shape, whole, strict=True))
    )


def _ours(do: Any, node: fx.Node, query: Any, key: Any, values: Any, *mask: Any) -> Any:
    return do(SHORT, query, key, values, list(mask), scale_of(node), True)


SHORT_ATTENTION = Alternative(NAME, "attention stays a library's", fits, _ours)
"""Our kernel, in the place of whichever library's there is."""
