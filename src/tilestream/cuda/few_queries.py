"""Attention of a few queries, launched (``kernels/operators/few_queries``)."""

from __future__ import annotations

import torch
from torch import Tensor

from tilestream.cuda.beside import Address, LaneCall, launch, readable
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.operators.few_queries import READ, kernel


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
    resident = 2 if heads > sms and queries <= 4 else 1
    return launch(call(query, key, value, mask, scale, resident), query.device)[0]


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
    rows = [readable(t) for t in (query, key, value)]
    held = [*rows, mask if mask is None or mask.stride(3) == 1 else mask.contiguous()]
    values = {"out": address(out), "positions": key.shape[2], "scale": scale}
    for name, t in zip(READ, held, strict=True):
        values[name] = 0 if t is None else address(t)
        values[f"{name}_stride"] = 0 if t is None or t.shape[0] == 1 else t.stride(0) * size
    values |= {f"{name}_row": t.stride(2) * size for name, t in zip(READ, rows, strict=False)}
    made = kernel(queries, features, resident, DTYPES[query.dtype], mask is not None)
    return LaneCall(made, heads, values, [out], held)
