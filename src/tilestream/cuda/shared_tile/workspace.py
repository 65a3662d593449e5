"""Device memory of a shared tile besides its tensors: flags, the middle, partial results."""

from __future__ import annotations

import weakref

from tilestream.cuda import driver
from tilestream.cuda.workspace import LINE_BYTES
from tilestream.schedule.model import ceil_to
from tilestream.schedule.shared_tile import SharedTile, Tail

PHASES = 4
"""Flags a CTA: result cleared, middle there, partial result there, rows of the operand there (``enum Phase`` of
collectives.cuh)."""


class SharedWorkspace:
    """One allocation, from the driver (see ``cuda.workspace``): flags, all zero at first, the middle, partial results.

    The middle is ``[row tiles x groups x tile rows, columns of a group]`` in the products' dtype; a partial result
    ``[row tiles, columns, groups, rows x columns of a CTA]`` in fp32,
    of as many rows as its warps have. Where something stands in front of the first layer, what it makes is
    ``operand``, ``[row tiles x tile rows, k]``.
    """

    def __init__(self, s: SharedTile) -> None:
        flags = PHASES * s.ctas * LINE_BYTES
        middle = ceil_to(s.row_tiles * s.groups * s.tile_rows * s.group_columns * 2, LINE_BYTES)
        partial = s.ctas * s.live_threads * s.out_columns * 2 if s.tail is Tail.PARTIALS else 0
        partial = ceil_to(partial, LINE_BYTES)
        operand = s.row_tiles * s.tile_rows * s.block.sizes[0] * 2 if s.block.before else 0
        self.flags = driver.allocate_zeros(flags + middle + partial + operand)
        weakref.finalize(self, driver.free, self.flags).atexit = False  # the process's end frees it anyway
        self.middle = self.flags + flags
        self.partial = self.middle + middle
        self.operand = self.partial + partial
