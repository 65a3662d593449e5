"""Gradients of attention over few keys (``include/few_keys_gradients.cuh``)."""

from __future__ import annotations

from functools import cache
from math import ceil

from tilestream.devices.h200 import H200
from tilestream.kernels.operators.few_keys import MOST_TERMS, SHARED, TILE, Attention
from tilestream.kernels.operators.lanes import LaneKernel, text_of
from tilestream.kernels.parts.params import Field, Struct, pointers

NAME = "tilestream_few_keys_gradients"
FEATURES = (16, 32, 64)
MOST = 128
"""Queries of a head, and keys."""
MOST_HELD = 64
"""Of both, where what is added to scores stays in registers, and so does its gradient."""
RESIDENT = {64: 3, 128: 1}
"""CTAs of an SM, by queries and keys up to which they have the registers that they want: none spills."""

PARAMS = Struct(
    "FewKeysGradientsParams",
    (
        Field("const char*", "from", 4, note="query, key, value, gradient of the result"),
        Field("const char*", "added", MOST_TERMS, note="to scores"),
        Field("char*", "to", 3, note="gradients of query, key, value: [batches, rows, .., heads, FEATURES]"),
        *pointers("sums", type="float*", notes={"sums": "[CTAs of a head, heads, QUERIES, KEYS]"}),
        Field("long long", "batch_bytes", 4, note="of what is read, from batch to batch"),
        Field("long long", "head_bytes", 4),
        Field("long long", "added_bytes", 3 * MOST_TERMS, note="of each from group, head, query to the next"),
        Field("int", "row_bytes", 4),
        Field("int", "to_row_bytes", 3),
        *(Field("int", name) for name in ("heads", "period", "turns", "each")),
        Field("float", "scale"),
    ),
)


def takes(a: Attention, summed: bool = False) -> bool:
    """Whether there is a kernel; ``summed``: the gradient of what is added is wanted."""
    most = MOST_HELD if summed else MOST
    return a.features in FEATURES and 0 < a.keys <= most and 0 < a.queries <= most and a.terms <= MOST_TERMS


def held(a: Attention) -> bool:
    """Whether what is added stays in registers."""
    return a.terms > 0 and max(a.keys, a.queries) <= MOST_HELD


def warps(a: Attention) -> int:
    """Of a CTA, each with 16 queries and 16 keys."""
    return 4 if max(a.keys, a.queries) <= MOST_HELD else 8


def each(a: Attention) -> int:
    """Sequences that a CTA takes, so that an H200's SMs have their CTAs at once."""
    return max(1, min(a.turns, ceil(a.heads * a.batches / (H200.sms * resident(a)))))


def parts(a: Attention, each: int) -> int:
    """CTAs of a head."""
    return a.period * ceil(a.turns / each)


def shapes(a: Attention, each: int, summed: bool) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """Of its results: gradients of query, key and value in one, or of the first and of the other two; what adds up to
    the gradient of what is added."""
    together, features = a.queries == a.keys, (a.heads, a.features)
    firsts = (a.batches, a.queries, 3 if together else 1, *features)
    return (
        firsts,
        (0 if together else a.batches, a.keys, 2, *features),
        (parts(a, each) if summed else 0, a.heads, a.queries, a.keys),
    )


def resident(a: Attention) -> int:
    """CTAs of an SM, with their registers and, of two sequences, their shared memory."""
    most = next(ctas for size, ctas in RESIDENT.items() if max(a.keys, a.queries) <= size)
    return max(1, min(most, SHARED // (_shared_bytes(a, 2) + 1024)))


def _shared_bytes(a: Attention, buffers: int) -> int:
    row, keys = 2 * a.features, ceil(a.keys / TILE)
    given = 2 * TILE * (a.tiles + keys) * row
    return buffers * given + 2 * TILE * a.tiles * (2 * TILE * keys + 16) + warps(a) * TILE * row


@cache
def kernel(a: Attention, each: int, summed: bool) -> LaneKernel:
    """The kernel of an attention's gradients."""
    buffers = min(each, 2)
    shape = {
        "DTYPE": a.dtype, "FEATURES": a.features, "QUERIES": a.queries, "KEYS": a.keys, "WARPS": warps(a),
        "RESIDENT": resident(a), "BUFFERS": buffers, "TERMS": a.terms, "HELD": int(held(a)),
        "PAIRED": int(a.paired), "SAFE": int(a.safe), "SUMMED": int(summed),
    }  # fmt: skip
    text = text_of("few_keys_gradients.cuh", PARAMS, shape)
    return LaneKernel(NAME, text, PARAMS, warps(a), _shared_bytes(a, buffers))
