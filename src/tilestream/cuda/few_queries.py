"""Attention of a few queries that share keys and values, as in decoding (``include/few_queries.cuh``)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from tilestream.cuda.beside import Address, LaneCall, LaneKernel, launch, text_of
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.parts.params import Field, Struct, pointers

NAME = "tilestream_few_queries"
FEATURES = (32, 64, 128, 256)
"""Of a head: lanes have 8 each, and lanes of a position are a power of two of a warp's."""
MOST_QUERIES = 8
"""That share a head of keys: each is 16 registers a lane."""
ALONE, BESIDE = 8, 4
"""Warps of a CTA that has an SM to itself, and of one of two: few, so that a lane has registers for many positions that
are loaded at once."""


READ = ("query", "key", "value", "mask")
PARAMS = Struct(
    "FewQueriesParams",
    (
        *pointers(*READ, type="const char*", notes={"mask": "added to scores, if MASKED"}),
        Field("char*", "out", note="[heads, QUERIES, FEATURES]"),
        *(Field("long long", f"{name}_stride", note="bytes from head to head") for name in READ),
        *(Field("int", f"{name}_row", note="bytes from query to query, position to position") for name in READ[:3]),
        Field("int", "positions"),
        Field("float", "scale"),
    ),
)


@cache
def kernel(queries: int, features: int, resident: int, dtype: str = "bf16", masked: bool = True) -> LaneKernel:
    """The kernel for so many queries of so many features. ``resident``: CTAs that an SM should hold, 1 or 2."""
    warps = BESIDE if resident > 1 else ALONE
    shape = {"DTYPE": dtype, "QUERIES": queries, "FEATURES": features}
    launch = {"WARPS": warps, "RESIDENT": resident, "MASKED": int(masked)}
    shared_bytes = 4 * warps * queries * (features + 8)  # weighted values, maximum and sum of every query
    return LaneKernel(NAME, text_of("few_queries.cuh", PARAMS, shape | launch), PARAMS, warps, shared_bytes)


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """[heads, 1, queries, features]: attention of every head's queries over its positions.

    Args:
        query: [heads, 1, queries, features], bf16 or f16, 1 to 8 queries of 32, 64, 128 or 256 features.
        key, value: [heads, 1, positions, features].
        mask: added to scores; [heads or 1, 1, queries, positions], alike for all queries of a head.
        scale: of products of queries and keys.
    """
    heads, _, queries, _ = query.shape
    sms = torch.cuda.get_device_properties(query.device).multi_processor_count
    made = call(query, key, value, mask, scale, 2 if heads > sms and queries <= 4 else 1)
    if heads:
        launch(made, query.device)
    return made.results[0]


def call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float,
    resident: int,
    address: Address = Tensor.data_ptr,
) -> LaneCall:
    """The launch of ``attention`` by the kernel of ``resident`` CTAs an SM."""
    heads, _, queries, features = query.shape
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    size = out.element_size()
    rows = [_readable(t) for t in (query, key, value)]
    held = [*rows, mask if mask is None else _rows(mask)]
    values = {"out": address(out), "positions": key.shape[2], "scale": scale}
    for name, t in zip(READ, held, strict=True):
        values[name] = 0 if t is None else address(t)
        values[f"{name}_stride"] = 0 if t is None or t.shape[0] == 1 else t.stride(0) * size
    values |= {f"{name}_row": t.stride(2) * size for name, t in zip(READ, rows, strict=False)}
    made = kernel(queries, features, resident, DTYPES[query.dtype], mask is not None)
    return LaneCall(made, heads, values, [out], held)


def _readable(t: Tensor) -> Tensor:
    """Rows that start on 16 bytes: the tensor, or a copy."""
    size = t.element_size()
    odd = [n for n in (t.stride(0), t.stride(2)) if n * size % 16]
    return t.contiguous().clone() if t.stride(3) != 1 or odd or t.data_ptr() % 16 else t


def _rows(mask: Tensor) -> Tensor:
    """The mask with its positions one behind the other."""
    return mask if mask.stride(3) == 1 else mask.contiguous()
