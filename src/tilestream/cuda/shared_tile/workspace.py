"""Device memory of a shared tile besides its tensors: flags, the middle, partial results."""

from __future__ import annotations

import weakref

from tilestream.cuda import driver
from tilestream.cuda.workspace import LINE_BYTES
from tilestream.schedule.model import ceil_to
from tilestream.schedule.shared_tile import SharedTile, Tail

PHASES = 2
"""Flags a CTA: result cleared, middle there (``enum Phase`` of collectives.cuh)."""


class SharedWorkspace:
    """Memory from the driver (see ``cuda.workspace``): flags, all zero at first, and the middle; partial results.

    The middle is ``[row tiles x groups x tile rows, columns of a group]`` in the products' dtype; a partial result
    ``[row tiles, columns, groups, tile rows x columns of a CTA]`` in fp32, at first all bits set: nothing has come.
    """

    def __init__(self, s: SharedTile) -> None:
        flags = PHASES * s.ctas * LINE_BYTES
        middle = ceil_to(s.row_tiles * s.groups * s.tile_rows * s.group_columns * 2, LINE_BYTES)
        self.flags = _owned(self, flags + middle)
        self.middle = self.flags + flags
        partial = s.ctas * s.tile_rows * s.out_columns * 4
        self.partial = _owned(self, partial, 0xFF) if s.tail is Tail.PARTIALS else 0


def _owned(owner: SharedWorkspace, size: int, fill: int = 0) -> int:
    """Device memory that lives as long as its owner."""
    address = driver.allocate(size, fill)
    weakref.finalize(owner, driver.free, address).atexit = False  # the process's end frees it anyway
    return address
