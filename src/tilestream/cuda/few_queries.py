"""Attention of a few queries that share keys and values, as in decoding (``include/few_queries.cuh``)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from tilestream.cuda import beside
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


@dataclass(frozen=True)
class Kernel:
    """What a kernel is compiled for. ``resident``: CTAs that an SM should hold, 1 or 2."""

    queries: int
    features: int
    resident: int
    dtype: str = "bf16"
    masked: bool = True

    @property
    def warps(self) -> int:
        return BESIDE if self.resident > 1 else ALONE

    @property
    def shared_bytes(self) -> int:
        """What warps leave: weighted values, maximum and sum of every query."""
        return 4 * self.warps * self.queries * (self.features + 8)

    @property
    def text(self) -> str:
        shape = {"DTYPE": self.dtype, "QUERIES": self.queries, "FEATURES": self.features}
        launch = {"WARPS": self.warps, "RESIDENT": self.resident, "MASKED": int(self.masked)}
        lines = [f"#define {name} {n}" for name, n in (shape | launch).items()]
        return "\n".join([*lines, PARAMS.text, '#include "few_queries.cuh"', ""])


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float) -> Tensor:
    """[heads, 1, queries, features]: attention of every head's queries over its positions.

    Args:
        query: [heads, 1, queries, features], bf16 or f16, 1 to 8 queries of 32, 64, 128 or 256 features.
        key, value: [heads, 1, positions, features].
        mask: added to scores; [heads or 1, 1, queries, positions], alike for all queries of a head.
        scale: of products of queries and keys.
    """
    heads, _, queries, features = query.shape
    sms = torch.cuda.get_device_properties(query.device).multi_processor_count
    resident = 2 if heads > sms and queries <= 4 else 1
    kernel = Kernel(queries, features, resident, DTYPES[query.dtype], mask is not None)
    out = torch.empty(query.shape, dtype=query.dtype, device=query.device)
    if heads:
        operands = [_readable(t) for t in (query, key, value)]
        packed = parameters(operands, None if mask is None else _rows(mask), out, scale)
        stream = torch.cuda.current_stream(out.device).cuda_stream
        _loaded(kernel, out.device.index or 0).launch((heads, 1), 32 * kernel.warps, stream, packed)
    return out


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


def parameters(
    operands: list[Tensor],
    mask: Tensor | None,
    out: Tensor,
    scale: float,
    address: Callable[[Tensor], int] = Tensor.data_ptr,
) -> bytes:
    """The bytes of ``FewQueriesParams`` of query, key and value, at their addresses."""
    size = operands[0].element_size()
    tensors = dict(zip(READ, [*operands, mask], strict=True))
    strides = {
        f"{name}_stride": 0 if t is None or t.shape[0] == 1 else t.stride(0) * size for name, t in tensors.items()
    }
    rows = {f"{name}_row": t.stride(2) * size for name, t in zip(READ, operands, strict=False)}
    addresses = {name: 0 if t is None else address(t) for name, t in tensors.items()}
    positions = operands[1].shape[2]
    return PARAMS.pack(**addresses, out=address(out), **strides, **rows, positions=positions, scale=scale)


@cache
def _loaded(kernel: Kernel, device_index: int) -> beside.driver.Function:
    return beside.function(NAME, kernel.text, device_index, kernel.shared_bytes)


def _readable(t: Tensor) -> Tensor:
    """Rows that start on 16 bytes: the tensor, or a copy."""
    size = t.element_size()
    odd = [n for n in (t.stride(0), t.stride(2)) if n * size % 16]
    return t.contiguous().clone() if t.stride(3) != 1 or odd or t.data_ptr() % 16 else t


def _rows(mask: Tensor) -> Tensor:
    """The mask with its positions one behind the other."""
    return mask if mask.stride(3) == 1 else mask.contiguous()
