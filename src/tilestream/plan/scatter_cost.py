"""Microseconds of sums of rows by an index, on an H200: by atomics, and in sorted order."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from tilestream.graph.nodes import aten
from tilestream.graph.rewrites.operators import LONG
from tilestream.graph.sizes import hint
from tilestream.graph.sums import Part, Sum

ATOMIC_US = 8e-6
"""An element that ``index_add`` takes (16 bits; 8.6e-6 to 9.5e-6 in docs/message-passing.md). Inductor's gradient of a
table takes twice as long, in fp32, for uniform lookups."""

FLOAT_US = 1.6e-6
"""The same of fp32, where Inductor adds in the kernel that makes what is added (five layers of 1,000,000 edges of 64
features, 527 us with all that is around them)."""

WIDE_BYTES, BYTES_PER_US = 10, 4.3e6
"""Bytes an element of a table's 16-bit gradient, besides: Inductor clears it in fp32, reads it, and writes it rounded;
and what the memory moves."""

SUM_US, SUM_BYTES_PER_US = 3.0, 3e6
SORT_US, SORT_EDGES_PER_US = 55.0, 1.5e4
"""Of sums over sorted messages, and of sorting them: a fixed part and a rate. No script fits them: the eight
sorts of docs/message-passing.md are 1 to 18 % off, and its first sum is a third too slow."""

CTA_BYTES, ROUND_ROWS, ROUND_US = 8192, 8, 1.2
"""A CTA of the sums has rows of so many bytes side by side, and reads eight behind each other before it waits for
memory, about so long. Estimated; not measured alone."""
PIECE_EDGES, MOST_PIECES = 1024, 8
"""A node of more than ``LONG`` edges is summed by whole CTAs, one for so many of its edges, of which each has a piece
of the columns (``segments.cuh``)."""


def atomics_us(s: Sum) -> float:
    """What torch's and Inductor's kernels take."""
    table = s.node.target is aten.embedding_dense_backward.default
    wide = prod(map(hint, s.node.meta["val"].shape)) * WIDE_BYTES / BYTES_PER_US if table else 0.0
    narrow = s.node.meta["val"].element_size() == 2 or s.how != "sum"  # a compare-and-swap an element
    return wide + sum((ATOMIC_US if narrow else FLOAT_US) * edges(p) * p.features for p in s.parts)


def sum_us(together: Sequence[Sum]) -> float:
    """What one launch takes that makes all of these, without the sort."""
    row = together[0].parts[0].features * together[0].node.meta["val"].element_size()
    rows = sum(hint(s.node.meta["val"].shape[0]) + sum(map(edges, s.parts)) for s in together)
    return SUM_US + max(rows * row / SUM_BYTES_PER_US, *(_longest_us(s, row) for s in together))


def _longest_us(s: Sum, row: int) -> float:
    """Of a node, were all alike: few nodes keep few CTAs busy.

    Args:
        row: its bytes.
    """
    each = sum(map(edges, s.parts)) / max(1, hint(s.node.meta["val"].shape[0]))
    pieces = min(MOST_PIECES, ceil(each / PIECE_EDGES))
    groups = 1 if each <= LONG else max(1, CTA_BYTES * pieces // row)
    return each / (groups * ROUND_ROWS) * ROUND_US


def sort_us(sorted_edges: int) -> float:
    return SORT_US + sorted_edges / SORT_EDGES_PER_US


def edges(part: Part) -> int:
    return prod(map(hint, part.index.meta["val"].shape))
