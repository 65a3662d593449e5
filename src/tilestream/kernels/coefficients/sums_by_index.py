"""Sums of rows by an index, on an H200: by atomics, and in sorted order. Microseconds, of no other device."""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil

from tilestream.kernels.costs import Amount, Counts
from tilestream.kernels.segments.layout import LONG, MOST_PIECES, PIECE_EDGES

ATOMIC_US = 7.6e-6
"""An element that ``index_add`` takes, of 16 bits or fp32: torch's kernel, which Inductor leaves as it is in bf16. What
Inductor makes otherwise, but does not add, counts as much: maxima and minima compare and swap, and gradients of tables
are twice as slow, in fp32, for uniform lookups."""

ADDED_US = {2: 1.3e-6, 4: 2.4e-6}
"""The same of ``scatter_add`` and of ``index_add`` in fp32, which Inductor adds by a kernel of its own, by the bytes of
an element; ``index_put`` and ``scatter_reduce`` are taken for the same. These are uniform indices: where a tenth of
1,000,000 edges goes to one node, they take 7 to 19 times as long."""

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


def atomics(elements: Sequence[tuple[float, float]], of_table: float = 0.0) -> Counts:
    """What torch's and Inductor's kernels take: elements that are added, with the microseconds of one, and those of a
    table's gradient that is made, if one is."""
    wide = Amount("table", of_table * WIDE_BYTES, BYTES_PER_US * 1e6)
    return Counts("atomics", (wide, *(Amount("additions", count, 1e6 / us) for count, us in elements)))


def sums(row: int, groups: Sequence[tuple[int, int]]) -> Counts:
    """What one launch takes that makes all of these, without the sort.

    Args:
        row: bytes of one.
        groups: edges and nodes of each sum.
    """
    rows = sum(edges + nodes for edges, nodes in groups)
    streamed = Amount("rows", rows * row, SUM_BYTES_PER_US * 1e6)
    waits = (Amount("longest node", 1e-6 * _longest_us(edges / max(1, nodes), row)) for edges, nodes in groups)
    return Counts("sums", (Amount("launch", 1e-6 * SUM_US), Counts("streams", (streamed, *waits), max)))


def _longest_us(each: float, row: int) -> float:
    """Of a node with so many edges, as all have: few nodes keep few CTAs busy."""
    pieces = min(MOST_PIECES, ceil(each / PIECE_EDGES))
    groups = 1 if each <= LONG else max(1, CTA_BYTES * pieces // row)
    return each / (groups * ROUND_ROWS) * ROUND_US


def sort(edges: int) -> Counts:
    """What sorting takes, with where each node's edges start."""
    if edges <= TILE:
        return Counts("sort", (Amount("tile", 1e-6 * (TILE_US + edges * TILE_EDGE_US)),))
    held, dram = SORT_US + edges * SORT_EDGE_US, edges * DRAM_EDGE_US
    return Counts("sort", (Amount("tiles", 1e-6 * held), Amount("dram", 1e-6 * dram)), max)
