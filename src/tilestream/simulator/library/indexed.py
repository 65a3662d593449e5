"""What kernels move that read rows of a table by an index, or add to them by atomics, as Inductor's do.

Indices are drawn evenly and independently. Additions are made in the L2: each row takes a time for every line of 128
bytes that it meets and for its bytes, whatever the type. Rows that are no multiple of eight bytes are added to word by
word, and those of odd numbers of 16-bit elements one at a time, by a compare and swap. Additions to one row come one
after another. Constants: fitted on every second kernel of ``silicon_indexed.json`` (docs/truth.md).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import sqrt

from tilestream.devices import Device

LINE = 128
LEAST = 64
"""Bytes that DRAM delivers at least of a row that the L2 does not hold."""
HELD = 0.52
"""Share of the L2 that holds tables while messages stream past."""
ATOMIC_LINE, ATOMIC_BYTE = 61.6, 0.72
"""What a line and a byte of an addition take of the L2, as bytes that are written to it."""
LANES = 32
SINGLE, SWAPPED = 167.0, 5.6
"""The same of an instruction of a warp that adds single words, to rows that are no multiple of eight bytes; and how
much longer 16-bit elements take, where rows are no multiple of four."""
AGAIN = 1.64
"""How much longer DRAM takes for rows that it reads and writes again, out of order."""
SAME_S = 7.1e-9
"""From one addition to the next to the same row."""


@dataclass(frozen=True)
class Indexed:
    """``draws`` of rows of ``features`` elements of ``itemsize`` bytes out of ``rows``; ``adds`` to them, else reads.

    ``most``: draws of the row that is drawn most often; by default that of even draws.
    """

    rows: float
    draws: float
    features: float
    itemsize: float
    adds: bool = False
    most: float | None = None

    @property
    def row(self) -> float:
        """Bytes of a row."""
        return self.features * self.itemsize

    @property
    def size(self) -> float:
        return self.rows * self.row

    @property
    def busiest(self) -> float:
        """Draws of the busiest row."""
        each = self.draws / self.rows
        return self.most if self.most is not None else min(self.draws, each + 3.5 * sqrt(each))

    @property
    def distinct(self) -> float:
        """Rows that are drawn at all."""
        return self.rows * (1.0 - (1.0 - 1.0 / self.rows) ** self.draws)


@dataclass(frozen=True)
class Traffic:
    """Bytes beside the distinct ones of each table: from and to DRAM, of shared lines and of writes at the L2; and the
    seconds that additions to one row take."""

    dram_read: float = 0.0
    dram_write: float = 0.0
    shared_read: float = 0.0
    l2_write: float = 0.0
    serial_s: float = 0.0


def traffic(tables: Sequence[Indexed], device: Device) -> Traffic:
    """Of a kernel with these accesses by index."""
    held = min(1.0, HELD * device.l2_bytes / max(1.0, sum(t.distinct * t.row for t in tables)))
    read = written = shared = atomics = serial_s = 0.0
    for t in tables:
        more = _again(t, held)
        read += more
        if t.adds:
            read += (AGAIN - 1) * more
            written += AGAIN * more
            atomics += t.draws * _addition(t) - t.size
            serial_s = max(serial_s, t.busiest * SAME_S)
        else:
            shared += t.draws * t.row - t.distinct * t.row
    return Traffic(read, written, max(0.0, shared), max(0.0, atomics), serial_s)


def _again(t: Indexed, held: float) -> float:
    """Bytes that DRAM delivers beyond each row that is drawn, once: whole sectors, and rows that the L2 let go."""
    least = max(LEAST, t.row)
    first = t.distinct * (least if held < 1.0 else t.row)
    return first - t.distinct * t.row + max(0.0, t.draws - t.distinct) * least * (1.0 - held)


def _addition(t: Indexed) -> float:
    """What adding one row takes of the L2, as bytes written."""
    if t.row % 8:
        swapped = t.row % 4 > 0
        lanes = t.features if swapped else t.row / 4
        return (lanes / LANES + 1.0) * SINGLE * (SWAPPED if swapped else 1.0)
    straddled = 1.0 if LINE % t.row == 0 or t.row % LINE == 0 else 2.0
    lines = max(1.0, (t.row - 1) // LINE + straddled)
    return ATOMIC_LINE * lines + ATOMIC_BYTE * t.row
