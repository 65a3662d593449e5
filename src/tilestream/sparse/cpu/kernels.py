"""What the loops of a region call: products of dense matrices and weighted sums of rows, blocked for registers.

Arrays are flat and contiguous, all float32 or all float64; ``at`` is an element of one, and rows of results are
contiguous.
"""

from __future__ import annotations

import numpy as np
from numba import njit

from tilestream.sparse.cpu.registers import ROWS, add_product, lanes, prefetch, read, write, zeros

WIDE = 8
"""Vectors of a row that a sum of rows keeps in registers."""
LISTED = 1024
"""Rows that are listed for sums at a time."""
SUMS = 64
"""Sums that they are for, at most."""
AHEAD = 12
"""How many rows before it is added a row is asked for."""


@njit(error_model="numpy", nogil=True)
def product(
    a: np.ndarray,
    a_at: int,
    a_row: int,
    a_step: int,
    b: np.ndarray,
    b_at: int,
    b_step: int,
    c: np.ndarray,
    c_at: int,
    c_row: int,
    rows: int,
    inner: int,
    columns: int,
) -> None:
    """``c[i, j] = sum_k a[i, k] * b[k, j]``: matrices at ``*_at``, with elements ``*_row`` and ``*_step`` apart."""
    m, vector = 0, lanes(c)
    while m < rows:
        high = m + ROWS <= rows
        at, n = a_at + m * a_row, 0
        while n < columns:
            left, to = min(columns - n, 2 * vector), c_at + m * c_row + n
            if not high:
                one = zeros(c, 1, 2)
                for k in range(inner):
                    one = add_product(one, a, at + k * a_step, 0, b, b_at + k * b_step + n, left)
                write(one, c, to, 0, left)
            elif left < 2 * vector:
                block = zeros(c, ROWS, 2)
                for k in range(inner):
                    prefetch(a, at + ROWS * (a_row + k))  # the rows after these, where they lie one after the other
                    block = add_product(block, a, at + k * a_step, a_row, b, b_at + k * b_step + n, left)
                write(block, c, to, c_row, left)
            else:
                block = zeros(c, ROWS, 2)
                for k in range(inner):
                    prefetch(a, at + ROWS * (a_row + k))
                    block = add_product(block, a, at + k * a_step, a_row, b, b_at + k * b_step + n, None)
                write(block, c, to, c_row, None)
            n += left
        m += ROWS if high else 1


@njit(error_model="numpy", nogil=True)
def sum_rows(
    c: np.ndarray,
    at: int,
    row: int,
    x: np.ndarray,
    starts: np.ndarray,
    factors: np.ndarray,
    ends: np.ndarray,
    rows: int,
    width: int,
    more: bool,
) -> None:
    """``c[at + i * row:][:width] = sum_p factors[p] * x[starts[p]:][:width]`` for ``rows`` rows.

    Row ``i`` has what is listed before ``ends[i]`` and not before ``ends[i - 1]``; ``more``: add to the first row.
    """
    first, listed, vector = 0, ends[rows - 1], lanes(c)
    for i in range(rows):
        to, last, n = at + i * row, ends[i], 0
        again = more and i == 0
        while n + WIDE * vector <= width:
            wide = zeros(c, 1, WIDE)
            if again:
                wide = read(wide, c, to + n, 0, None)
            for p in range(first, last):
                for v in range(WIDE):
                    prefetch(x, starts[min(p + AHEAD, listed - 1)] + n + v * vector)
                wide = add_product(wide, factors, p, 0, x, starts[p] + n, None)
            write(wide, c, to + n, 0, None)
            n += WIDE * vector
        while n + 2 * vector <= width:
            two = zeros(c, 1, 2)
            if again:
                two = read(two, c, to + n, 0, None)
            for p in range(first, last):
                two = add_product(two, factors, p, 0, x, starts[p] + n, None)
            write(two, c, to + n, 0, None)
            n += 2 * vector
        while n < width:
            left = min(width - n, vector)
            one = zeros(c, 1, 1)
            if again:
                one = read(one, c, to + n, 0, left)
            for p in range(first, last):
                one = add_product(one, factors, p, 0, x, starts[p] + n, left)
            write(one, c, to + n, 0, left)
            n += left
        first = last
