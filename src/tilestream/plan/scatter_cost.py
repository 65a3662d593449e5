"""Microseconds of sums of rows by an index, on an H200: by atomics, and in sorted order."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil, prod

from tilestream.graph.nodes import aten
from tilestream.graph.sizes import hint
from tilestream.graph.sums import Part, Sum
from tilestream.kernels.segments.layout import LONG, MOST_PIECES, PIECE_EDGES

ATOMIC_US = 7.6e-6
"""An element that ``index_add`` takes, of 16 bits or fp32: torch's kernel, which Inductor leaves as it is. What
Inductor makes otherwise, but does not add, counts as much: maxima and minima compare and swap, and gradients of tables
are twice as slow, in fp32, for uniform lookups."""

ADDED_US = {2: 1.3e-6, 4: 2.4e-6}
"""The same of ``scatter_add``, which Inductor adds by a kernel of its own, by the bytes of an element;
``index_put`` and ``scatter_reduce`` are taken for the same. These are uniform indices: where a tenth of 1,000,000 edges
goes to one node, they take 7 to 19 times as long."""

WIDE_BYTES, BYTES_PER_US = 10, 4.3e6
"""Bytes an element of a table's 16-bit gradient, besides: Inductor clears it in fp32, reads it, and writes it rounded;
and what the memory moves."""

SUM_US, SUM_BYTES_PER_US = 3.0, 3e6
"""Of sums over sorted messages: a fixed part and a rate, up to a half too slow
(benchmarks/results/scatter_costs.json)."""

TILE, TILE_US, TILE_EDGE_US = 8192, 8.2, 1.2e-3
SORT_US, SORT_EDGE_US, DRAM_EDGE_US = 32.4, 2.0e-5, 4.6e-5
"""Of a sort (``cuda.sorted_keys``): what one launch sorts, a fixed part and an edge's; what several do, the same where
the L2 holds the edges, and an edge's where it does not. ``python -m benchmarks.fit.fit_scatter_cost`` fits these, and
those of atomics, to ``benchmarks/results``."""

CTA_BYTES, ROUND_ROWS, ROUND_US = 2048, 4, 1.2
"""A CTA of the sums has rows of so many bytes side by side, and reads four behind each other before it waits for
memory, about so long. Estimated; not measured alone."""


def atomics_us(s: Sum) -> float:
    """What torch's and Inductor's kernels take."""
    table = s.node.target is aten.embedding_dense_backward.default
    wide = prod(map(hint, s.node.meta["val"].shape)) * WIDE_BYTES / BYTES_PER_US if table else 0.0
    return wide + sum(_element_us(p, s.how) * edges(p) * p.features for p in s.parts)


def _element_us(part: Part, how: str) -> float:
    others = part.node.target in (aten.index_add.default, aten.embedding_dense_backward.default)
    added = how in ("sum", "mean") and not others
    return ADDED_US[min(4, part.node.meta["val"].element_size())] if added else ATOMIC_US


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
    """What sorting takes, with where each node's edges start."""
    if sorted_edges <= TILE:
        return TILE_US + sorted_edges * TILE_EDGE_US
    return max(SORT_US + sorted_edges * SORT_EDGE_US, sorted_edges * DRAM_EDGE_US)


def edges(part: Part) -> int:
    return prod(map(hint, part.index.meta["val"].shape))
