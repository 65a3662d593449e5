"""Attention of a few queries that share keys and values, as in decoding (``include/few_queries.cuh``)."""

from __future__ import annotations

from functools import cache

from tilestream.kernels.operators.lanes import LaneKernel, text_of
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
