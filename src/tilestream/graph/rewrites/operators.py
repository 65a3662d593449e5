"""Operators that rewrites put into graphs: what they mean, on any device. ``run.device_ops`` has them as kernels."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from tilestream.errors import InputError

LIBRARY = torch.library.Library("tilestream", "FRAGMENT")
for _schema in (
    "padded(Tensor[] matrices, SymInt columns) -> Tensor[]",
    "segments(Tensor index, SymInt nodes) -> (Tensor, Tensor, Tensor)",
    "segment_sum(Tensor? base, Tensor rows, Tensor order, Tensor starts, Tensor busy) -> Tensor",
):
    LIBRARY.define(_schema, tags=(torch.Tag.needs_exact_strides,))

PADDED = torch.ops.tilestream.padded.default
SEGMENTS = torch.ops.tilestream.segments.default
SEGMENT_SUM = torch.ops.tilestream.segment_sum.default

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


def segments(index: Tensor, nodes: int) -> tuple[Tensor, Tensor, Tensor]:
    """``index`` (integers [edges]) sorted, equal ones in their order: their places, int32 [edges]; where those of each
    node start, int32 [nodes + 1]; and which nodes have many, int32, for the GPU's kernel alone.

    Raises:
        InputError: an index is no node.
    """
    ordered, order = torch.sort(torch.where(index < 0, index + nodes, index), stable=True)
    if len(ordered) and not 0 <= int(ordered[0]) <= int(ordered[-1]) < nodes:
        raise InputError(f"an index of a sum of rows is outside of its {nodes} rows", "give indices that exist")
    busy = torch.zeros(busy_words(len(index)), dtype=torch.int32)
    return order.int(), torch.searchsorted(ordered, torch.arange(nodes + 1), out_int32=True), busy


def segment_sum(base: Tensor | None, rows: Tensor, order: Tensor, starts: Tensor, busy: Tensor) -> Tensor:
    """``base`` (or zeros) plus the rows of each segment, added in fp32 in the order of ``order``: [nodes, features].

    Args:
        rows: [any, features]; ``order`` names those that count, each any number of times.
        order, starts, busy: of ``segments``, or rows in the places of the edges in ``order``.
    """
    nodes = torch.arange(len(starts) - 1).repeat_interleave(starts.diff())
    total = torch.zeros(len(starts) - 1, rows.shape[1]).index_add(0, nodes, rows[order].float())
    return (total if base is None else total + base).to(rows.dtype)


def _padded_shapes(matrices: list[Tensor], columns: int) -> list[Tensor]:
    return [m.new_empty((m.shape[0], columns)) for m in matrices]


def _segments_shapes(index: Tensor, nodes: Any) -> tuple[Tensor, Tensor, Tensor]:
    edges = index.shape[0]
    order, starts, busy = (index.new_empty((n,), dtype=torch.int32) for n in (edges, nodes + 1, busy_words(edges)))
    return order, starts, busy


def _sum_shape(base: Tensor | None, rows: Tensor, order: Tensor, starts: Tensor, busy: Tensor) -> Tensor:
    return rows.new_empty((starts.shape[0] - 1, rows.shape[1]))


for _made, _shapes in ((padded, _padded_shapes), (segments, _segments_shapes), (segment_sum, _sum_shape)):
    LIBRARY.impl(_made.__name__, _made, "CompositeExplicitAutograd")
    torch.library.register_fake(f"tilestream::{_made.__name__}", _shapes, lib=LIBRARY)
