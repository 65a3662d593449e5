"""Device memory of a shared tile besides its tensors: flags, the middle, partial results."""

from __future__ import annotations

import weakref

from tilestream.cuda import driver
from tilestream.cuda.shared_tile.params import Space
from tilestream.schedule.shared_tile import SharedTile


class SharedWorkspace:
    """One allocation, from the driver (see ``cuda.workspace``), laid out as ``Space`` says; all zero at first."""

    def __init__(self, s: SharedTile) -> None:
        self.address = driver.allocate_zeros(Space.of(s).total)
        weakref.finalize(self, driver.free, self.address).atexit = False  # the process's end frees it anyway
