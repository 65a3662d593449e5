"""Gradients of attention over few keys (``include/few_keys_gradients.cuh``)."""

from __future__ import annotations

from functools import cache
from math import ceil

from tilestream.devices.h200 import H200
from tilestream.kernels.operators.few_keys import MOST_TERMS, SHARED, TILE, Attention
from tilestream.kernels.operators.lanes import LaneKernel, text_of
from tilestream.kernels.parts.params import Field, Struct

NAME = "tilestream_few_keys_gradients"
FEATURES = (16, 32, 64)
MOST = 128
"""Queries of a head, and keys."""
MOST_HELD = 64
"""Of both, where what is added to scores stays in registers, and so does its gradient."""
RESIDENT = {64: 3, 128: 1}
"""CTAs of an SM, by queries and keys up to which they have the registers that they want: none spills. Two of long
heads, whose gradients of keys stay in registers."""

PARAMS = Struct(
    "FewKeysGradientsParams",
    (
        Field("const char*", "from", 4, note="query, key, value, gradient of the result"),
        Field("const char*", "added", MOST_TERMS, note="to scores"),
        Field("char*", "to", 3, note="gradients of query, key, value: [batches, rows, .., heads, FEATURES]"),
        Field("float*", "sums", note="[CTAs, heads, QUERIES, KEYS], or [CTAs, batches, KEYS, 2, heads, FEATURES]"),
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
    keys, queries = (MOST_HELD, MOST_HELD) if summed else (MOST_HELD if is_long(a) else MOST, a.queries)
    return a.features in FEATURES and 0 < a.keys <= keys and 0 < a.queries <= queries and a.terms <= MOST_TERMS


def is_long(a: Attention) -> bool:
    """Whether a head has more queries than the warps of a CTA have at a time."""
    return a.queries > MOST


def held(a: Attention) -> bool:
    """Whether what is added stays in registers."""
    return a.terms > 0 and max(a.keys, a.queries) <= MOST_HELD


def warps(a: Attention) -> int:
    """Of a CTA, each with 16 queries and 16 keys."""
    return 4 if is_long(a) or max(a.keys, a.queries) <= MOST_HELD else 8


def spans(a: Attention) -> int:
    """Of a head's queries, as many as a CTA's warps have at a time."""
    return ceil(a.queries / (TILE * warps(a)))


def each(a: Attention) -> int:
    """Sequences that a CTA takes, or spans of a long head, so that an H200's SMs have their CTAs at once."""
    most, heads = (spans(a), a.batches * a.heads) if is_long(a) else (a.turns, a.heads * a.period)
    return max(1, min(most, ceil(heads * most / (H200.sms * resident(a)))))


def parts(a: Attention, each: int) -> int:
    """CTAs of a head: of all sequences, or of each if it is long."""
    return ceil(spans(a) / each) if is_long(a) else a.period * ceil(a.turns / each)


Shape = tuple[int, ...]


def shapes(a: Attention, each: int, summed: bool) -> tuple[Shape, Shape, Shape]:
    """Of its results: gradients of query, key and value in one, or of the first and of the other two; what adds up to
    the gradient of what is added, or to the other two of a long head."""
    together, long, of_keys = a.queries == a.keys, is_long(a), (a.keys, 2, a.heads, a.features)
    firsts = (a.batches, a.queries, 3 if together else 1, a.heads, a.features)
    sums = (parts(a, each), a.batches, *of_keys) if long else (parts(a, each) * summed, a.heads, a.queries, a.keys)
    return firsts, (0 if together or long else a.batches, *of_keys), sums


def resident(a: Attention) -> int:
    """CTAs of an SM, with their registers and, of two sequences, their shared memory."""
    most = 2 if is_long(a) else next(ctas for size, ctas in RESIDENT.items() if max(a.keys, a.queries) <= size)
    return max(1, min(most, SHARED // (_shared_bytes(a, 2) + 1024)))


def _shared_bytes(a: Attention, buffers: int) -> int:
    row, keys, queries = 2 * a.features, ceil(a.keys / TILE), warps(a) if is_long(a) else a.tiles
    heads = 1 if is_long(a) else buffers
    given = 2 * TILE * (queries * buffers + keys * heads) * row
    return given + 2 * TILE * queries * (2 * TILE * keys + 16) + warps(a) * TILE * row


@cache
def kernel(a: Attention, each: int, summed: bool) -> LaneKernel:
    """The kernel of an attention's gradients."""
    buffers = min(each, 2)
    shape = {
        "DTYPE": a.dtype, "FEATURES": a.features, "QUERIES": a.queries, "KEYS": a.keys, "WARPS": warps(a),
        "RESIDENT": resident(a), "BUFFERS": buffers, "TERMS": a.terms, "HELD": int(held(a)),
        "PAIRED": int(a.paired), "SAFE": int(a.safe), "SUMMED": int(summed), "LONG": int(is_long(a)),
    }  # fmt: skip
    text = text_of("few_keys_gradients.cuh", PARAMS, shape)
    return LaneKernel(NAME, text, PARAMS, warps(a), _shared_bytes(a, buffers))
