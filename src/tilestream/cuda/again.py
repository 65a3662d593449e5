"""Launches that come again with the same addresses: prepared once, and a CUDA graph from the second time on.

Torch's allocator gives the calls of a loop the same memory time and again. In steady state a call then enqueues one
graph, whatever it launches, and packs nothing.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

import torch

from tilestream.cuda import driver
from tilestream.cuda.driver import Clearing, LaunchGraph, PreparedLaunch

Prepared = PreparedLaunch | Clearing


class _Thread(threading.local):
    """Whether a thread that may never have called CUDA has a context."""

    ready = False


_thread = _Thread()


class Again:
    """What was launched on a device.

    Args:
        most: sets of addresses that are kept; where there are more, all are forgotten.
    """

    def __init__(self, device_index: int, most: int) -> None:
        self._device, self._most = device_index, most
        self._launches: dict[tuple[int | float, ...], Sequence[Prepared]] = {}
        self._graphs: dict[tuple[int | float, ...], LaunchGraph] = {}

    def enqueue(self, key: tuple[int | float, ...], stream: int, prepare: Callable[[int], Sequence[Prepared]]) -> None:
        """Enqueue what ``prepare`` makes, on ``stream``, torch's current one.

        Args:
            key: all that ``prepare`` depends on.
            prepare: takes the number of the capture under way, 0 for none (``driver.capture_number``).
        """
        if not _thread.ready:
            driver.ensure_context(self._device)
            _thread.ready = True
        if torch._C._cuda_isCurrentStreamCapturing():
            return _launched(prepare(driver.capture_number(stream)))
        graph = self._graphs.get(key)
        if graph is not None:
            return graph()
        launches = self._launches.pop(key, None)
        if launches is not None:  # not the first time: a graph takes long to make
            graph = self._graphs[key] = LaunchGraph(launches, stream)
            return graph()
        if len(self._launches) + len(self._graphs) >= self._most:
            self._launches.clear()
            self._graphs.clear()
        launches = self._launches[key] = prepare(0)
        _launched(launches)


def _launched(launches: Sequence[Prepared]) -> None:
    for launch in launches:
        launch()
