"""Sums of rows by segments on the GPU, in the order of the sorted rows."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor

from tilestream.cuda import beside
from tilestream.cuda.cache import compile_ahead
from tilestream.ir.dtypes import DTYPES
from tilestream.kernels.parts.params import Field, Struct, pointers

SUM_THREADS, LANE_BYTES, LONG, MOST_EACH = 512, 16, 64, 8  # segments.cuh
CTAS = 264
"""Two an SM, which is what is resident: as many sum nodes of more than ``LONG`` edges where there are few nodes."""

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


def begin(dtypes: Iterable[torch.dtype]) -> None:
    """Begin to compile what sums of rows of these dtypes will launch, that nobody waits for yet."""
    named = [DTYPES[dtype] for dtype in dict.fromkeys(dtypes)]
    compile_ahead([beside.BesideSource("tilestream_sum", text(dtype)) for dtype in named])


def sums(base: Tensor | None, rows: Tensor, order: Tensor, starts: Tensor, busy: Tensor) -> Tensor:
    """``base`` (or zeros) plus, for each node, the rows ``order[starts[node] : starts[node + 1]]``, rounded once.

    Args:
        base: [nodes, features], contiguous, like ``rows``.
        rows: [any below 2^31, features], contiguous, of a dtype of tiles; a row has a multiple of 16 bytes,
            8 KB at most.
        order: int32 [edges], rows in any order, each any number of times.
        starts, busy: of ``sorted_keys.segments``.
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
    """The source of the kernel that sums ``dtype``."""
    return f'#define SUM_DTYPE {dtype}\n#include "lanes.cuh"\n{SUMS.text}\n#include "segments.cuh"\n'
