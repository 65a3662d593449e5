"""Threads that compile kernels, one a core for the whole process; they take what is wanted most first.

NVRTC gives the interpreter back while it works, so threads are as good as processes and share its library.
"""

from __future__ import annotations

import atexit
import heapq
import itertools
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

FEW = 4
"""So many cores are never too many."""

NOW = -1000
"""The rank of what somebody waits for."""


@dataclass
class Task:
    """Work that a thread takes once, however often it was asked for."""

    run: Callable[[], None]
    taken: bool = field(default=False, init=False)


class Workers:
    """``cores`` threads, begun as they are needed."""

    def __init__(self, cores: int) -> None:
        self._cores = cores
        self._waiting: list[tuple[int, int, Task]] = []
        self._numbers = itertools.count()
        self._change = threading.Condition()
        self._threads: list[threading.Thread] = []
        self._idle = 0
        self._ended = False
        self._resting = 0
        self._process = os.getpid()

    def submit(self, task: Task, rank: int) -> None:
        """Have ``task`` run, after those of a lower rank and those of its rank that came before.

        May be asked again, with another rank.
        """
        with self._change:
            if task.taken:
                return
            heapq.heappush(self._waiting, (rank, next(self._numbers), task))
            if self._idle < len(self._waiting) and len(self._threads) < self._cores:
                thread = threading.Thread(target=self._work, name=f"nvrtc-{len(self._threads)}", daemon=True)
                self._threads.append(thread)
                thread.start()
            self._change.notify()

    @contextmanager
    def resting(self) -> Iterator[None]:
        """Inside, nothing begins but what somebody waits for."""
        with self._change:
            self._resting += 1
        try:
            yield
        finally:
            with self._change:
                self._resting -= 1
                self._change.notify_all()

    def end(self) -> None:
        """Drop what has not begun, and wait for the rest: a process must not end under a compiler."""
        if os.getpid() != self._process:
            return  # a fork, which has none of the threads, and perhaps a lock that one of them held
        with self._change:
            self._ended = True
            self._waiting.clear()
            self._change.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while (task := self._next()) is not None:
            task.run()

    def _next(self) -> Task | None:
        with self._change:
            while not self._ended:
                while self._waiting and self._may_begin(self._waiting[0][0]):
                    task = heapq.heappop(self._waiting)[-1]
                    if not task.taken:
                        task.taken = True
                        return task
                self._idle += 1
                self._change.wait()
                self._idle -= 1
        return None

    def _may_begin(self, rank: int) -> bool:
        """What is not wanted first takes half of the cores at most: beside 15 others NeRF's longest kernel took 5.3 s
        on an H200's host, beside seven 4.0, and everything waits for it."""
        if self._resting:
            return rank < 0
        busy = len(self._threads) - self._idle - 1  # but for the one that asks
        return rank <= 0 or busy < max(FEW, self._cores // 2)


_all: list[Workers] = []
os.register_at_fork(after_in_child=_all.clear)  # the threads stay in the parent


def workers() -> Workers:
    """Those of this process."""
    if not _all:
        _all.append(Workers(len(os.sched_getaffinity(0))))
        atexit.register(_all[0].end)
    return _all[0]
