"""Attention over the pairs that a mask keeps, tile by tile (``include/masked_attention.cuh``, ``mask_tiles.cuh``)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tilestream.cuda import driver
from tilestream.cuda.beside import Address, LaneCall, LaneKernel, launch, text_of
from tilestream.cuda.heads import LOG2_E, by_copies, heads_map
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.parts.mma import by_rows, specialisation
from tilestream.kernels.parts.pairs import MOST_INDICES, PairMask
from tilestream.kernels.parts.params import MAP, Field, Struct, at_least_one, pointers
from tilestream.kernels.parts.tensor_maps import Encode

TILES, NAME = "tilestream_mask_tiles", "tilestream_masked_attention"
TILE, BLOCK = 64, 128
"""Queries and keys of a tile, which has a state and bits; of a block of four, which a warpgroup's or a list's is."""
MASK_WARPS, MOST_CHUNK = 8, 256
CTAS_WANTED = 2112
"""Of the kernel that looks at masks: four on each of two hundred and some SMs' halves, and blocks are unlike."""
CTAS_SPLIT = 198
"""Of a band: where no more have 128 queries, one and a half an SM, twice as many of 64 are done sooner: 64 CTAs of 16
tiles each took 16.2 us, and these 10.6; 192 took 13.4 and 12.2, but 256 took 13.6 and 14.4 (H200)."""
ATTENTION_WARPS = 12
STAGES = 4

ATTENTION = Struct(
    "MaskedAttentionParams",
    (
        *(Field(MAP, name) for name in ("query", "key", "value", "out")),
        Field("const char*", "states", note="[units, 64-row tiles, state_row]"),
        Field("const char*", "bits", note="[units, 64-row tiles, state_row, 64 rows] of 64 keys each"),
        *(
            Field("int", n)
            for n in ("state_row", "query_tiles", "batches", "heads", "heads_a_key", "mask_batch", "mask_head")
        ),
        Field("int", "keys", note="of a head, where a band is kept"),
        *(Field("int", n, note="keys that a query keeps, besides that at its place") for n in ("before", "after")),
        Field("float", "scale", note="of scores, times log2(e)"),
    ),
)


class Blocks(NamedTuple):
    """Which blocks of a mask are looked at, and which are kept whole: ``BlockMask``'s lists, int32.

    Args:
        some, all: [batch, heads, rows] and [batch, heads, rows, blocks]: how many, and which. ``all`` may be missing.
        rows, keys: of a block, multiples of 128.
    """

    some: tuple[Tensor, Tensor]
    all: tuple[Tensor, Tensor] | None
    rows: int
    keys: int


class Tiles(NamedTuple):
    """What a mask keeps of tiles of 64 queries and keys, as ``tiles_call`` leaves it.

    Args:
        states: uint8 [batch, heads, tiles of queries, tiles of keys]: 0 none, 1 some, 2 all pairs.
        bits: int64, the same and 64 rows: a bit for each key, where some pairs are kept.
    """

    states: Tensor
    bits: Tensor


def _mask_params(reads: int) -> Struct:
    numbers = ("state_row", "queries", "keys", "query_blocks", "key_blocks", "chunk_blocks", "chunks", "mask_heads")
    lists = ("list_batches", "list_heads", "list_rows", "list_length", "rows_a_list", "blocks_a_list")
    count = max(reads, 1)
    return Struct(
        "MaskTilesParams",
        (
            Field("char*", "states"),
            Field("u32*", "bits"),
            *pointers("some_count", "some", "all_count", "all", type="const int*"),
            Field("const char*", "read", count),
            Field("long long", "strides", MOST_INDICES * count),
            Field("long long", "sizes", MOST_INDICES * count),
            *(Field("int", name) for name in (*numbers, *lists)),
        ),
    )


@cache
def tiles_kernel(mask: PairMask, dtypes: tuple[str, ...], listed: bool) -> LaneKernel:
    """The kernel that looks at a mask, which reads tensors of ``dtypes``; ``listed``: at some blocks alone."""
    params = _mask_params(len(dtypes))
    body = f"{{\n  TS_LANES_SHARED(smem);\n  ts::mask_tiles<Mask, {str(listed).lower()}>(p, smem);\n}}"
    head = f"TS_LANES_KERNEL({32 * MASK_WARPS}, 2) {TILES}(const TS_PARAM {params.name} p)"
    parts = ('#include "lanes.cuh"\n#include "mask_tiles.cuh"', params.text, mask.code(dtypes), f"{head} {body}\n")
    return LaneKernel(TILES, "\n".join(parts), params, MASK_WARPS, 4 * MASK_WARPS + 4 * MOST_CHUNK)


@cache
def attention_kernel(features: int, dtype: str = "bf16", band: bool = False, split: bool = False) -> LaneKernel:
    """The kernel for heads of so many features, a multiple of 16 up to 128; over a ``band`` of keys, or ``Tiles``.

    ``split``: a CTA's warpgroups share the keys of 64 queries, of a band.
    """
    blocks, chunks = features // 8, -(-features // TILE)
    defines = {"DTYPE": dtype, "FEATURES": features, "STAGES": STAGES, "RESIDENT": 2 if chunks == 1 else 1}
    defines |= {"BAND": int(band), "SPLIT": int(split)}
    made = [specialisation(dtype, TILE // 8), by_rows(dtype, blocks)]
    text = text_of("masked_attention.cuh", ATTENTION, defines, products=made)
    shared = TILE * 128 * chunks * (2 + 2 * STAGES) + 20 * STAGES + 16
    joined = 128 + 512 * (4 * blocks + 4) if split else 0
    return LaneKernel(NAME, text, ATTENTION, ATTENTION_WARPS, shared + joined, warpgroups=2)


def tiles_call(
    mask: PairMask,
    read: Sequence[Tensor],
    blocks: Blocks | None,
    sizes: tuple[int, int, int, int],
    address: Address = Tensor.data_ptr,
) -> LaneCall:
    """The launch that makes ``Tiles`` of a mask over (batches, heads, queries, keys), each one of its own.

    Args:
        read: what the mask reads, on the device.
        blocks: None: every pair is looked at.
    """
    batches, heads, queries, keys = sizes
    query_blocks, key_blocks = -(-queries // BLOCK), 2 * -(-keys // (2 * BLOCK))  # states in whole words
    row = 2 * key_blocks
    device = read[0].device if blocks is None else blocks.some[0].device
    states = torch.empty(batches, heads, 2 * query_blocks, row, dtype=torch.uint8, device=device)
    bits = torch.empty(batches, heads, 2 * query_blocks, row, TILE, dtype=torch.int64, device=device)
    chunk = max(1, min(batches * heads * query_blocks * key_blocks // CTAS_WANTED, key_blocks, MOST_CHUNK))
    chunks = -(-key_blocks // chunk)
    kernel = tiles_kernel(mask, tuple(str(t.dtype) for t in read), blocks is not None)
    values: dict[str, Any] = {"states": address(states), "bits": address(bits), "state_row": row}
    values |= {"queries": queries, "keys": keys}
    values |= {"query_blocks": query_blocks, "key_blocks": key_blocks, "chunk_blocks": chunk, "chunks": chunks}
    values |= {"mask_heads": heads, "read": at_least_one([address(t) for t in read])}
    for name, of in (("strides", Tensor.stride), ("sizes", Tensor.size)):
        each = [(*of(t), *[0] * (MOST_INDICES - t.dim())) for t in read]
        values[name] = [n for one in each for n in one] or [0] * MOST_INDICES
    held = [*read, *_list_values(blocks, values, address)]
    return LaneCall(kernel, batches * heads * query_blocks * chunks, values, [states, bits], held)


def _list_values(blocks: Blocks | None, values: dict[str, Any], address: Address) -> list[Tensor]:
    """Fills in what the kernel is told of lists; what it reads for that."""
    lists = [None] * 4 if blocks is None else [*blocks.some, *(blocks.all or (None, None))]
    held = [None if t is None else t.contiguous() for t in lists]
    names = ("some_count", "some", "all_count", "all")
    values |= {n: 0 if t is None else address(t) for n, t in zip(names, held, strict=True)}
    shape = (1, 1, 1, 1) if blocks is None else tuple(blocks.some[1].shape)
    values |= dict(zip(("list_batches", "list_heads", "list_rows", "list_length"), shape, strict=True))
    values["rows_a_list"] = 1 if blocks is None else blocks.rows // BLOCK
    values["blocks_a_list"] = 1 if blocks is None else blocks.keys // BLOCK
    return [t for t in held if t is not None]


def attention_call(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    tiles: Tiles | tuple[int, int],
    scale: float,
    out: Tensor,
    address: Address = Tensor.data_ptr,
    encode: Encode = driver.encoded,
) -> LaneCall:
    """The launch that fills ``out``, like ``query``, with attention over what a mask keeps.

    Args:
        query: [batch, heads, queries, features], bf16 or f16.
        key, value: [batch, heads of keys, keys, features]; so many heads of queries share one.
        tiles: of a mask for each batch or all, each head or all; or ``PairMask.band``, which needs none.
    """
    batch, heads, queries, features = query.shape
    dtype = DTYPES[query.dtype]
    operands = {"query": by_copies(query), "key": by_copies(key), "value": by_copies(value), "out": out}
    values: dict[str, Any] = {name: encode(heads_map(t, TILE, address)) for name, t in operands.items()}
    banded = not isinstance(tiles, Tiles)
    split = banded and -(-queries // BLOCK) * heads * batch <= CTAS_SPLIT and key.shape[2] > TILE
    query_tiles = -(-queries // (TILE if split else BLOCK))
    values |= {"query_tiles": query_tiles, "batches": batch, "heads": heads, "heads_a_key": heads // key.shape[1]}
    values["scale"] = scale * LOG2_E
    held = list(operands.values())
    if isinstance(tiles, Tiles):
        units, before, after = tiles.states.shape[:2], 0, 0
        values |= {"states": address(tiles.states), "bits": address(tiles.bits), "state_row": tiles.states.shape[3]}
        values |= {"mask_batch": units[1] if units[0] > 1 else 0, "mask_head": 1 if units[1] > 1 else 0}
        held += tiles
    else:
        before, after = tiles
        values |= dict.fromkeys(("states", "bits", "state_row", "mask_batch", "mask_head"), 0)
    values |= {"keys": key.shape[2], "before": before, "after": after}
    kernel = attention_kernel(features, dtype, banded, split)
    return LaneCall(kernel, query_tiles * heads * batch, values, [out], held)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: PairMask,
    read: Sequence[Tensor],
    blocks: Blocks | None,
    sizes: tuple[int, int],
    scale: float,
    out: Tensor,
) -> Tensor:
    """``out``, filled: attention over the pairs that ``mask`` keeps; a row without one is zero.

    Args:
        sizes: batches and heads for which the mask is different, or 1.
    """
    if not out.numel():
        return out
    tiles = mask.band if blocks is None else None
    if tiles is None:
        tiles = Tiles(*launch(tiles_call(mask, read, blocks, (*sizes, query.shape[2], key.shape[2])), query.device))
    launch(attention_call(query, key, value, tiles, scale, out), query.device)
    return out
