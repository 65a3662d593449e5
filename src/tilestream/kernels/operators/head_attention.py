"""Attention over at most 272 keys by warpgroups, a head's keys in shared memory (``include/head_attention.cuh``)."""

from __future__ import annotations

from functools import cache
from math import ceil

from tilestream.kernels.operators.few_keys import MOST_TERMS, SHARED, START, Attention
from tilestream.kernels.operators.lanes import LaneKernel, text_of
from tilestream.kernels.parts.mma import by_rows, specialisation
from tilestream.kernels.parts.params import MAP, Field, Struct

NAME = "tilestream_head_attention"
ROWS, CHUNK_BYTES, FEATURES, MOST_KEYS, LEAST_QUERIES = 64, 8192, 64, 272, 33
"""Queries of a tile, and its bytes; of a head, those of a chunk: of 32 half a chunk is empty, and lanes were faster in
both sizes that were timed; keys of two products; queries that half fill a tile."""
MOST_BLOCKS, MOST_OF_THREE = 32, 200
"""Blocks of 8 keys of a product, and of a box; keys up to which three warpgroups of an SM have registers for
their scores; two above. ptxas refuses a product of more to three, whose lanes are launched with 128 registers."""
STEP, WEIGHT = 32.0, 8.0
"""Cycles of the hardware: of a product's step of 64 columns, 16 deep; of a warp's 32 exponentials."""
TURN, ADDED = 250.0, 4.0
"""Cycles of a tile besides, and of a number that is added to each of its rows, assumed. The first is fitted on 13
sizes on an H200, with ``START``; products and exponentials are added up, although other groups' run beside them."""

PARAMS = Struct(
    "HeadAttentionParams",
    (
        *(Field(MAP, name) for name in ("query", "key", "value", "out")),
        Field("const char*", "added", MOST_TERMS, note="to scores"),
        Field("long long", "added_bytes", 3 * MOST_TERMS, note="of each from group, head, query to the next"),
        *(Field("int", name) for name in ("batches", "heads", "period")),
        Field("float", "scale", note="of scores; times log2(e) where nothing is added"),
    ),
)


def takes(a: Attention) -> bool:
    """Whether it computes an attention: most tiles are full, and two terms come by words, else registers spill."""
    fits = a.features == FEATURES and a.keys <= MOST_KEYS and buffers(a) > 0
    return fits and a.queries >= LEAST_QUERIES and (a.terms < 2 or (a.terms == 2 and a.paired))


def value_rows(a: Attention) -> int:
    """Of keys and of values in shared memory: whole steps of a product."""
    return ceil(a.keys / 16) * 16


def box_rows(a: Attention) -> int:
    """Of a copy of keys: all, or half of more than a box has."""
    return value_rows(a) if a.keys <= 8 * MOST_BLOCKS else value_rows(a) // 2


def tiles(a: Attention) -> int:
    """Of queries of all heads."""
    return a.batches * a.heads * ceil(a.queries / ROWS)


def _buffer_bytes(a: Attention) -> int:
    return ceil(a.queries / ROWS) * CHUNK_BYTES + 2 * value_rows(a) * 128


def buffers(a: Attention) -> int:
    """Heads in shared memory at a time: two, or those of two tiles for each warpgroup."""
    return min(max(2, ceil(2 * groups(a) / ceil(a.queries / ROWS))), SHARED // (_buffer_bytes(a) + 16))


def groups(a: Attention) -> int:
    """Warpgroups of a CTA that compute."""
    return 3 if a.keys <= MOST_OF_THREE else 2


def cycles(a: Attention, sms: int) -> float:
    """Of an SM for its tiles."""
    product = 2 * STEP * ceil(a.keys / 16)
    added = a.terms * ADDED * a.keys / (2 if a.paired else 1)
    return START + ceil(tiles(a) / sms) * (product + WEIGHT * a.keys / 2 + added + TURN)


@cache
def kernel(a: Attention) -> LaneKernel:
    """The kernel of an attention that it ``takes``."""
    blocks, features = ceil(a.keys / 8), a.features // 8
    defines = {"DTYPE": a.dtype, "FEATURES": a.features, "QUERIES": a.queries, "KEYS": a.keys}
    defines |= {"BUFFERS": buffers(a), "GROUPS": groups(a)}
    defines |= {"TERMS": a.terms, "PAIRED": int(a.paired), "SAFE": str(a.safe).lower()}
    widths = {min(blocks, MOST_BLOCKS), max(blocks - MOST_BLOCKS, 1)}  # the second is compiled where it is not used
    products = [*(specialisation(a.dtype, wide) for wide in sorted(widths)), by_rows(a.dtype, features)]
    text = text_of("head_attention.cuh", PARAMS, defines, products=products)
    shared = buffers(a) * (_buffer_bytes(a) + 16)
    return LaneKernel(NAME, text, PARAMS, 4 * (groups(a) + 1), shared, warpgroups=groups(a))
