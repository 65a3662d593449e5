"""Operators that rewrites put into graphs: what they mean, on any device. ``run.device_ops`` has them as kernels."""

from __future__ import annotations

from math import inf
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tilestream.errors import InputError
from tilestream.graph.own import operator

INDEX = "tilestream.index"
"""In the ``meta`` of an order of edges: the name of the node that was sorted, where that is one index of all edges."""

LOOSE = "tilestream.loose"
"""In the ``meta`` of bounds: rows may be in no segment, so that no region writes what each row has."""

COPIED, LENT = 1, 2
"""How an operator gives a list that was kept: as a copy, or itself, where operators of ours alone read it."""

DROPPED = -(2**31)
"""Where an edge goes that is of no node."""

LONG = 64
"""Of the rows that are summed at one node: more are summed by whole CTAs."""


def busy_words(rows: Any) -> Any:
    """A count, and two words for each piece that nodes of more than ``LONG`` rows are summed in."""
    return 1 + 2 * (rows // LONG)


def padded(matrices: list[Tensor], columns: int) -> list[Tensor]:
    """Of each matrix [rows, k] its copy [rows, columns], zeros behind its own; 16-bit elements on a GPU.

    Inductor's own kernel for it moves an element a lane: 479 columns, 2,048 rows and a weight of 1,024, 3.4 us for 2.2;
    on many rows it makes a kernel of each: 32,768 rows, 17.8 and 2.6 for 16.7 (H200).
    """
    return [functional.pad(m, (0, columns - m.shape[1])).contiguous() for m in matrices]


def joined(vectors: list[Tensor]) -> Tensor:
    """Vectors of one dtype, one behind the other, by eager's kernel.

    Inductor's has a branch for each, up to 125 in one: Triton compiles that for 14 s (MNASNet's batch norms, H200).
    """
    return torch.cat(vectors)


def segments(
    index: Tensor, nodes: int, kept: int = 0, wraps: bool = True, drops: bool = False
) -> tuple[Tensor, Tensor, Tensor]:
    """``index`` (integers [edges]) sorted, equal ones in their order: their places, int32 [edges]; where those of each
    node start, int32 [nodes + 1]; and which nodes have many, int32, for the GPU's kernel alone.

    Args:
        kept: ``COPIED`` or ``LENT``: ``index`` is an argument of the graph, which does not change it, so the next call
            may have the same one.
        wraps: indices below zero count from the end; else they are no nodes.
        drops: edges whose index is ``DROPPED`` are of no node, and behind all others.

    Raises:
        InputError: an index is no node.
    """
    wrapped = torch.where(index < 0, index + nodes, index) if wraps else index
    named = (wrapped >= 0) & (wrapped < nodes)
    if drops:
        named, wrapped = named | (index == DROPPED), torch.where(index == DROPPED, nodes, wrapped)
    ordered, order = torch.sort(wrapped, stable=True)
    if not bool(named.all()):
        raise InputError(f"an index of a sum of rows is outside of its {nodes} rows", "give indices that exist")
    busy = torch.zeros(busy_words(len(index)), dtype=torch.int32)
    return order.int(), torch.searchsorted(ordered, torch.arange(nodes + 1), out_int32=True), busy


def sorted_index(index: Tensor, order: Tensor, rows: int, wraps: bool = True, kept: int = 0) -> Tensor:
    """Which of a table's ``rows`` the edges name in the order of ``order``, int32 [edges]; none of them is below zero.

    ``kept``: as of ``segments``, whose order this is.

    Raises:
        InputError: an index below zero, and it does not wrap (``segments``).
    """
    found = index[order]
    if not wraps and bool((found < 0).any()):
        raise InputError(f"an index of a table's rows is outside of its {rows} rows", "give indices that exist")
    return torch.where(found < 0, found + rows, found).int()


def check_bounds(starts: Tensor, edges: int) -> None:
    """
    Raises:
        InputError: bounds are below zero, go down, or beyond the edges; says where.
    """
    bad = ((starts.diff() < 0) | (starts[:-1] < 0) | (starts[1:] > edges)).nonzero()
    if len(bad):
        at = int(bad[0])
        found = f"those of position {at} are {int(starts[at])} to {int(starts[at + 1])}, of {edges} rows"
        raise InputError(f"bounds of segments: {found}", "give bounds that never go down, from 0 to the number of rows")


_REDUCES = {"max": ("amax", torch.maximum, -inf), "min": ("amin", torch.minimum, inf), "mul": ("prod", torch.mul, 1.0)}


def segment_reduce(
    base: Tensor | None, rows: Tensor, order: Tensor | None, starts: Tensor, busy: Tensor | None, how: str = "sum"
) -> Tensor:
    """The rows of each segment reduced with ``base``, in fp32 and in the order of ``order``: [nodes, *].

    Without ``base`` a segment of no rows has 0, of products 1.

    Args:
        base: [nodes, *], or None.
        rows: [any, *]; ``order`` names those that count, each any number of times; all as they lie where it is None.
        order, starts, busy: of ``segments``, or rows in the places of the edges in ``order``. ``busy`` may be None.
        how: ``sum``, ``max``, ``min`` or ``mul``.

    Raises:
        InputError: ``starts`` go down, or beyond the edges; says where.
    """
    rows = rows[order] if order is not None else rows
    check_bounds(starts, len(rows))
    counts, shape = starts.diff(), (len(starts) - 1, *rows.shape[1:])
    rows = rows[int(starts[0]) : int(starts[-1])]
    nodes = torch.arange(len(counts), device=rows.device).repeat_interleave(counts)
    picked = rows if rows.dtype == torch.float64 else rows.float()
    if how == "sum":
        total = picked.new_zeros(shape).index_add(0, nodes, picked)
        return (total if base is None else total + base).to(rows.dtype)
    reduce, combine, of_nothing = _REDUCES[how]
    places = nodes.view(-1, *[1] * (rows.dim() - 1)).expand_as(picked)
    total = picked.new_full(shape, of_nothing).scatter_reduce(0, places, picked, reduce)
    if base is not None:
        return combine(total, base.to(total.dtype)).to(rows.dtype)
    full = (counts > 0).view(-1, *[1] * (rows.dim() - 1))
    return torch.where(full, total, float(how == "mul")).to(rows.dtype)


def _segments_shapes(index: Tensor, nodes: Any, *_: Any) -> tuple[Tensor, Tensor, Tensor]:
    edges = index.shape[0]
    order, starts, busy = (index.new_empty((n,), dtype=torch.int32) for n in (edges, nodes + 1, busy_words(edges)))
    return order, starts, busy


PADDED = operator(padded, lambda matrices, columns: [m.new_empty(m.shape[0], columns) for m in matrices], "pad:padded")
JOINED = operator(joined, joined)
SEGMENTS = operator(segments, _segments_shapes)
SORTED_INDEX = operator(sorted_index, lambda _, order, *__: order.new_empty(order.shape, dtype=torch.int32))
SEGMENT_REDUCE = operator(
    segment_reduce, lambda _, rows, __, starts, *___: rows.new_empty(starts.shape[0] - 1, *rows.shape[1:])
)
