"""Operators that sum rows by segments: an index sorted once, then any number of sums in its order.

On a GPU they are ``cuda.segments``, elsewhere torch's operators, with the same result.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, fx

from tilestream.cuda.segments import busy_words
from tilestream.errors import InputError

_library = torch.library.Library("tilestream", "FRAGMENT")
for _schema in (
    "segments(Tensor index, SymInt nodes) -> (Tensor, Tensor, Tensor)",
    "segment_sum(Tensor? base, Tensor rows, Tensor order, Tensor starts, Tensor busy) -> Tensor",
):
    _library.define(_schema, tags=(torch.Tag.needs_exact_strides,))

SEGMENTS = torch.ops.tilestream.segments.default
SEGMENT_SUM = torch.ops.tilestream.segment_sum.default


def segments(index: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """``index`` (integers [edges]) sorted, equal ones in their order: their places, int64 [edges]; where those of each
    node start, int32 [nodes + 1]; and which nodes have many, int32, for the GPU's kernel alone.

    Raises:
        InputError: an index is no node. On a GPU the kernel ends, as torch's own assertion does, and the CUDA context
            is lost: this call says so where torch notices in time, else the next one.
    """
    if index.is_cuda:
        from tilestream.cuda.segments import explained, keys, starts

        with explained(index.device):
            ordered, order = torch.sort(keys(index.contiguous(), nodes), stable=True)
            firsts, busy = starts(ordered, nodes)
            return order, firsts, busy
    ordered, order = torch.sort(torch.where(index < 0, index + nodes, index), stable=True)
    if len(ordered) and not 0 <= int(ordered[0]) <= int(ordered[-1]) < nodes:
        raise InputError(f"an index of a sum of rows is outside of its {nodes} rows", "give indices that exist")
    busy = torch.zeros(busy_words(len(index)), dtype=torch.int32)
    return order, torch.searchsorted(ordered, torch.arange(nodes + 1), out_int32=True), busy


def segment_sum(base: Tensor | None, rows: Tensor, order: Tensor, starts: Tensor, busy: Tensor) -> Tensor:
    """``base`` (or zeros) plus the rows of each segment, added in fp32 in the order of ``order``: [nodes, features].

    Args:
        rows: [any, features]; ``order`` names those that count, each any number of times.
        order, starts, busy: of ``segments``, or rows in the places of the edges in ``order``.
    """
    if rows.is_cuda:
        from tilestream.cuda.segments import explained, sums

        with explained(rows.device):
            return sums(None if base is None else base.contiguous(), rows.contiguous(), order, starts, busy)
    nodes = torch.arange(len(starts) - 1).repeat_interleave(starts.diff())
    total = torch.zeros(len(starts) - 1, rows.shape[1]).index_add(0, nodes, rows[order].float())
    return (total if base is None else total + base).to(rows.dtype)


def begin_kernels(graph: fx.Graph) -> None:
    """Begin to compile the kernels of a graph's sums, which otherwise begin when the graph is first called."""
    summed = [node.args[1].meta["val"] for node in graph.find_nodes(op="call_function", target=SEGMENT_SUM)]
    if dtypes := [rows.dtype for rows in summed if rows.is_cuda]:
        from tilestream.cuda.segments import begin

        begin(dtypes)


def _segments_shape(index: Tensor, nodes: Any) -> tuple[Tensor, Tensor, Tensor]:
    starts, busy = (index.new_empty((n,), dtype=torch.int32) for n in (nodes + 1, busy_words(index.shape[0])))
    return index.new_empty(index.shape, dtype=torch.int64), starts, busy


def _sum_shape(base: Tensor | None, rows: Tensor, order: Tensor, starts: Tensor, busy: Tensor) -> Tensor:
    return rows.new_empty((starts.shape[0] - 1, rows.shape[1]))


_library.impl("segments", segments, "CompositeExplicitAutograd")
_library.impl("segment_sum", segment_sum, "CompositeExplicitAutograd")
torch.library.register_fake("tilestream::segments", _segments_shape, lib=_library)
torch.library.register_fake("tilestream::segment_sum", _sum_shape, lib=_library)
