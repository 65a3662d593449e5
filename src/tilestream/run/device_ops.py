"""Kernels of ours for the operators that rewrites put into graphs (``graph.rewrites.operators``)."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor, fx
from torch.nn import functional

from tilestream.graph.own import on_gpu
from tilestream.graph.rewrites import operators
from tilestream.graph.rewrites.operators import PADDED, SEGMENT_REDUCE, SEGMENTS, busy_words


def padded(matrices: list[Tensor], columns: int) -> list[Tensor]:
    """Copies with columns of zeros, all by one kernel."""
    from tilestream.cuda import pad

    return pad.padded(matrices, columns)


def segments(index: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """An index sorted.

    Raises:
        InputError: an index is no node. The kernel ends, as torch's own assertion does, and the CUDA context is lost:
            this call says so where torch notices in time, else the next one.
    """
    from tilestream.cuda import sorted_keys

    with sorted_keys.explained(index.device):
        busy = index.new_empty(busy_words(len(index)), dtype=torch.int32)
        return *sorted_keys.segments(index, nodes, busy), busy


def segment_reduce(
    base: Tensor | None, rows: Tensor, order: Tensor, starts: Tensor, busy: Tensor, how: str = "sum"
) -> Tensor:
    """The rows of each segment reduced; sums by a kernel of ours."""
    from tilestream.cuda.segments import LANE_BYTES, sums
    from tilestream.cuda.sorted_keys import explained

    if how != "sum" or rows.dtype == torch.float64:
        return operators.segment_reduce(base, rows, order, starts, busy, how)
    shape, features = (len(starts) - 1, *rows.shape[1:]), prod(rows.shape[1:])
    lacking = -features * rows.element_size() % LANE_BYTES // rows.element_size()

    def flat(x: Tensor) -> Tensor:
        x = x.reshape(x.shape[0], features)
        return functional.pad(x, (0, lacking)) if lacking else x.contiguous()

    with explained(rows.device):
        total = sums(None if base is None else flat(base), flat(rows), order, starts, busy)
    return (total[:, :features].contiguous() if lacking else total).view(shape)


def begin(graph: fx.Graph) -> None:
    """Begin to compile the kernels of a graph's sums, which otherwise begin when the graph is first called."""
    summed = [node.args[1].meta["val"] for node in graph.find_nodes(op="call_function", target=SEGMENT_REDUCE)]
    if dtypes := [rows.dtype for rows in summed if rows.is_cuda]:
        from tilestream.cuda import segments, sorted_keys

        segments.begin(dtypes)
        sorted_keys.begin()


for _defined, _kernel in ((PADDED, padded), (SEGMENTS, segments), (SEGMENT_REDUCE, segment_reduce)):
    on_gpu(_defined, _kernel)
