"""Device memory that a launch needs besides its tensors, one workspace a stream."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Generic, TypeVar

from tilestream.cuda import driver

W = TypeVar("W")


class Memory:
    """``size`` bytes at ``address``, all zero at first, given back with this object.

    They come from the driver, not from torch's allocator: a launch that is first seen inside a CUDA graph, or inside
    the memory pool of torch's CUDA-graph trees, would else leave memory in a pool that is not its own.
    """

    def __init__(self, size: int) -> None:
        self.address = driver.allocate_zeros(size)
        weakref.finalize(self, driver.free, self.address).atexit = False  # the process's end frees it anyway


class Workspaces(Generic[W]):
    """One workspace a stream; the launches that are captured into one graph on one stream share one of their own.

    Launches on one stream follow each other, so they can share flags and rings. A graph may be
    replayed on any stream beside others, so what it captured must be its alone, for as long as the
    compiled pipeline lives.

    Args:
        new: makes one.
    """

    def __init__(self, new: Callable[[], W]) -> None:
        self._new = new
        self._spaces: dict[tuple[int, int], W] = {}

    def take(self, stream: int, capture: int = 0) -> W:
        """The workspace for a launch on ``stream``; ``capture`` is the number of the capture under way, 0 for none."""
        if (capture, stream) not in self._spaces:
            self._spaces[capture, stream] = self._new()
        return self._spaces[capture, stream]
