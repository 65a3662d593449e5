"""A kernel that is being compiled in the background: further splits of registers once the first has spilled."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial

from tilestream.cuda.compile import KernelReport, Source, best, compile_split, is_settled
from tilestream.cuda.workers import Task, workers
from tilestream.errors import CompileError

AFTERWARDS = 100
"""Added to the rank of a split that may prove to be of no use."""


class Building:
    """``made`` gets what ``keep`` makes of the report of the best split, or a ``CompileError``.

    The first split is tried; where it spills, the next two side by side. Not before: 15 of the 17 kernels that NeRF's
    training step may want spill nothing, and splits that nobody takes were two thirds of what was compiled.

    Args:
        rank: how soon it is wanted; the lowest first (``Workers.submit``).
    """

    def __init__(self, source: Source, keep: Callable[[KernelReport], KernelReport], rank: int = 0) -> None:
        self.made: Future[KernelReport] = Future()
        self._source, self._keep, self._rank = source, keep, rank
        self._found: dict[int, KernelReport | CompileError] = {}
        self._tasks: list[Task] = []
        self._lock = threading.RLock()
        self._over = False
        self._ask(1, rank)

    def hurry(self, rank: int) -> None:
        """It is wanted as soon as what has this rank."""
        with self._lock:
            if rank >= self._rank:
                return
            self._rank = rank
            for index, task in enumerate(self._tasks):
                workers().submit(task, rank + AFTERWARDS * (index > len(self._found)))

    def _ask(self, count: int, rank: int) -> None:
        """Have ``count`` further splits tried, all but the first of them perhaps for nothing."""
        with self._lock:
            for further in range(min(count, len(self._source.register_splits) - len(self._tasks))):
                self._tasks.append(Task(partial(self._attempt, len(self._tasks))))
                workers().submit(self._tasks[-1], rank + AFTERWARDS * (further > 0))

    def _attempt(self, index: int) -> None:
        if self._over:
            return
        try:
            found: KernelReport | CompileError = compile_split(self._source, index)
        except CompileError as refused:
            found = refused
        except BaseException as fault:  # whoever waits must hear of it, whatever it is
            self._fail(fault)
            return
        with self._lock:
            self._found[index] = found
            tried: list[KernelReport | CompileError] = []
            splits = self._source.register_splits
            while len(tried) in self._found and not (tried and is_settled(tried, splits)):
                tried.append(self._found[len(tried)])
            if self._over or not tried:
                return
            self._over = is_settled(tried, splits) or len(tried) == len(splits)
            if not self._over:
                self._ask(len(tried) + 2 - len(self._tasks), self._rank - 1)
                return
        try:
            self.made.set_result(self._keep(best(tried)))
        except Exception as fault:
            self._fail(fault)

    def _fail(self, fault: BaseException) -> None:
        self._over = True
        if not self.made.done():
            self.made.set_exception(fault)
