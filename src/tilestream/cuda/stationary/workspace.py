"""Device memory of a stationary sum besides its tensors: a flag a CTA, and partial results."""

from __future__ import annotations

import weakref

from tilestream.cuda import driver
from tilestream.cuda.stationary.emit import StationarySource
from tilestream.cuda.workspace import LINE_BYTES


class SumWorkspace:
    """Memory from the driver (see ``cuda.workspace``): flags, all zero at first, then partial results in fp32."""

    def __init__(self, source: StationarySource) -> None:
        flags = source.ctas * LINE_BYTES
        self.flags = driver.allocate_zeros(flags + source.partial_bytes)
        weakref.finalize(self, driver.free, self.flags).atexit = False  # the process's end frees it anyway
        self.partials = self.flags + flags
