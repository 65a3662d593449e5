"""Sums of rows by segments on the GPU: where each segment starts, and the sums, in the order of the sorted rows."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from functools import cache

import torch
from torch import Tensor

from tilestream.cuda import beside
from tilestream.cuda.cache import compile_ahead
from tilestream.cuda.diagnose import Record, index_record
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.parts.params import Field, Struct, pointers

SUM_THREADS, LANE_BYTES, LONG, MOST_EACH = 512, 16, 64, 8  # segments.cuh
CTAS = 264
"""Two an SM, which is what is resident: as many sum nodes of more than ``LONG`` edges where there are few nodes."""

KEYS = Struct(
    "KeyParams",
    (
        *pointers("index", type="const void*"),
        *pointers("keys", type="int*"),
        Field("long long", "nodes"),
        Field("int", "edges"),
        Field("int", "wide", note="int64, not int32"),
        Field("u64*", "record", note="of lanes::give_up"),
    ),
)
STARTS = Struct(
    "StartParams",
    (
        Field("const int*", "keys", note="ascending"),
        Field("int*", "starts", note="of each node's edges, and the end"),
        Field("int*", "busy", note="zero, and room for what is to be done for nodes of more than LONG edges"),
        Field("int", "edges"),
        Field("int", "nodes"),
    ),
)
SUMS = Struct(
    "SumParams",
    (
        Field("const uint4*", "base", note="added to, or null"),
        *pointers("rows", type="const uint4*"),
        *pointers("order", "starts", "busy", type="const int*"),
        *pointers("out", type="uint4*"),
        Field("int", "nodes"),
        Field("int", "lanes"),
        Field(
            "int", "each", note="nodes, one after another, of each `lanes` threads: MOST_EACH where most have no edge"
        ),
    ),
)


def node_record() -> Record:
    """Of an index of a sum by segments that names no node."""
    return index_record(
        lambda _, edge, nodes, found: (
            f"the index of row {edge} of a sum of rows by their indices is {found}, and the sum has {nodes} rows"
        )
    )


@cache  # captured graphs keep its address
def _record(device: torch.device) -> Record:
    return node_record()


def begin(dtypes: Iterable[torch.dtype]) -> None:
    """Begin to compile what sums of rows of these dtypes will launch: three kernels that nobody waits for yet."""
    named = [("tilestream_keys", "bf16"), ("tilestream_starts", "bf16")]
    named += [("tilestream_sum", DTYPES[dtype]) for dtype in dict.fromkeys(dtypes)]
    compile_ahead([beside.BesideSource(name, text(dtype)) for name, dtype in named])


def explained(device: torch.device) -> AbstractContextManager[None]:
    """What is called inside fails with an ``InputError`` where an index of this or an earlier call is no node."""
    return _record(device).explained()


def keys(index: Tensor, nodes: int) -> Tensor:
    """``index`` (contiguous integers [edges]) as int32, those below zero counted from the end.

    One that is no node ends the kernel, as torch's device-side assertion does; ``explained`` says which it was.
    """
    found = torch.empty(len(index), dtype=torch.int32, device=index.device)
    if len(index):
        wide, record = int(index.dtype == torch.int64), _record(index.device).address
        packed = KEYS.pack(
            index=index.data_ptr(), keys=found.data_ptr(), nodes=nodes, edges=len(index), wide=wide, record=record
        )
        _launch("tilestream_keys", "bf16", -(-len(index) // 256), 256, packed, index.device)
    return found


def starts(keys: Tensor, nodes: int, busy: Tensor) -> Tensor:
    """Where each node's edges start among ascending ``keys`` (int32 [edges]), and the end: int32 [nodes + 1].

    ``busy``, int32 zeros [1 + 2 (edges / ``LONG``)], gets how many pieces nodes of more edges are summed in, and which.
    """
    found = torch.empty(nodes + 1, dtype=torch.int32, device=keys.device)
    at = {name: t.data_ptr() for name, t in (("keys", keys), ("starts", found), ("busy", busy))}
    packed = STARTS.pack(**at, edges=len(keys), nodes=nodes)
    _launch("tilestream_starts", "bf16", len(keys) // 256 + 1, 256, packed, keys.device)
    return found


def sums(base: Tensor | None, rows: Tensor, order: Tensor, starts: Tensor, busy: Tensor) -> Tensor:
    """``base`` (or zeros) plus, for each node, the rows ``order[starts[node] : starts[node + 1]]``, rounded once.

    Args:
        base: [nodes, features], contiguous, like ``rows``.
        rows: [any below 2^31, features], contiguous, of a dtype of tiles; a row has a multiple of 16 bytes,
            8 KB at most.
        order: int32 [edges], rows in any order, each any number of times.
        starts, busy: of ``starts``.
    """
    rows, base = _aligned(rows), None if base is None else _aligned(base)
    nodes, lanes = len(starts) - 1, rows.shape[1] * rows.element_size() // LANE_BYTES
    out = torch.empty(nodes, rows.shape[1], dtype=rows.dtype, device=rows.device)
    if nodes:
        tensors = {"base": base, "rows": rows, "order": order, "starts": starts, "busy": busy, "out": out}
        given = {name: 0 if t is None else t.data_ptr() for name, t in tensors.items()}
        at_once = SUM_THREADS // lanes
        # Where most nodes have no edge, a CTA is over before the next one's starts are here: it has many.
        each = max(1, min(MOST_EACH, nodes // (2 * CTAS * at_once))) if len(order) < nodes else 1
        packed = SUMS.pack(**given, nodes=nodes, lanes=lanes, each=each)
        ctas = max(-(-nodes // (at_once * each)), min(CTAS, len(order) // LONG))
        _launch("tilestream_sum", DTYPES[rows.dtype], ctas, SUM_THREADS, packed, rows.device)
    return out


def _aligned(rows: Tensor) -> Tensor:
    """A copy where rows do not begin at whole lanes, as those of a slice of a vector need not."""
    return rows if rows.data_ptr() % LANE_BYTES == 0 else rows.clone()


def _launch(name: str, dtype: str, ctas: int, threads: int, packed: bytes, device: torch.device) -> None:
    function = beside.function(name, text(dtype), device.index or 0)
    stream = torch.cuda.current_stream(device).cuda_stream
    function.launch((ctas, 1), threads, stream, packed)


@cache
def text(dtype: str) -> str:
    """The source of all three kernels, sums of ``dtype``."""
    structs = "\n".join(params.text for params in (KEYS, STARTS, SUMS))
    return f'#define SUM_DTYPE {dtype}\n#include "lanes.cuh"\n{structs}\n#include "segments.cuh"\n'
