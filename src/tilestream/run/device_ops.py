"""Kernels of ours for the operators that rewrites put into graphs (``graph.rewrites.operators``)."""

from __future__ import annotations

import torch
from torch import Tensor, fx

from tilestream.graph.rewrites.operators import LIBRARY, SEGMENT_SUM, busy_words


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
    from tilestream.cuda.segments import explained, keys, starts

    with explained(index.device):
        ordered, order = torch.sort(keys(index.contiguous(), nodes), stable=True)
        busy = torch.zeros(busy_words(len(index)), dtype=torch.int32, device=index.device)
        return order.int(), starts(ordered, nodes, busy), busy


def segment_sum(base: Tensor | None, rows: Tensor, order: Tensor, starts: Tensor, busy: Tensor) -> Tensor:
    """The rows of each segment summed."""
    from tilestream.cuda.segments import explained, sums

    with explained(rows.device):
        return sums(None if base is None else base.contiguous(), rows.contiguous(), order, starts, busy)


def begin(graph: fx.Graph) -> None:
    """Begin to compile the kernels of a graph's sums, which otherwise begin when the graph is first called."""
    summed = [node.args[1].meta["val"] for node in graph.find_nodes(op="call_function", target=SEGMENT_SUM)]
    if dtypes := [rows.dtype for rows in summed if rows.is_cuda]:
        from tilestream.cuda.segments import begin as compile_ahead

        compile_ahead(dtypes)


for _kernel in (padded, segments, segment_sum):
    LIBRARY.impl(_kernel.__name__, _kernel, "CUDA")
