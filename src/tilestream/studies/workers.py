"""Tasks on processes of their own, which end with the command that started them, however it ends."""

from __future__ import annotations

import contextlib
import importlib
import multiprocessing
import os
import sys
import threading
import time
import traceback
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess, parent_process
from typing import Any, TypeVar

from tilestream.errors import WorkerError
from tilestream.interrupts import held_back

T = TypeVar("T")
PATIENCE_S = 5.0
"""For processes to end by themselves, before they are killed."""


def spread(
    task: Callable[..., T], arguments: Sequence[tuple[Any, ...]], count: int, started: Callable[[int], None]
) -> Iterator[T]:
    """Results of ``task(*a)`` for each of ``arguments``, as they come, from ``count`` new processes.

    The processes leave SIGINT to this one. They end by themselves when all is done, or if this process is killed; they
    are killed when the iterator is closed or an exception passes through it. ``task``, arguments and results are
    pickled.

    Args:
        started: called with the index of the arguments that a process begins with.

    Raises:
        WorkerError: a process ended before its task did.
        Exception: what a task raised.
    """
    todo = deque(range(len(arguments)))
    workers: dict[Connection, BaseProcess] = {}

    def give(connection: Connection) -> None:
        if todo:
            index = todo.popleft()
            started(index)
            connection.send(arguments[index])

    try:
        for _ in range(min(count, len(arguments))):
            connection, process = _start(task)
            workers[connection] = process
            give(connection)
        for _ in arguments:
            (connection, *_) = wait(list(workers))
            assert isinstance(connection, Connection)
            result = _received(connection, workers[connection])
            give(connection)
            yield result
        _part(workers)
    finally:
        with held_back():
            for process in workers.values():
                process.kill()
            for connection, process in workers.items():
                process.join()
                connection.close()


def _part(workers: Mapping[Connection, BaseProcess]) -> None:
    """Let processes that have no more to do end by themselves: they then give back what they hold of the system."""
    for connection in workers:
        connection.close()
    until = time.monotonic() + PATIENCE_S
    for process in workers.values():
        process.join(max(0.0, until - time.monotonic()))


def _start(task: Callable[..., Any]) -> tuple[Connection, BaseProcess]:
    context = multiprocessing.get_context("spawn")  # a fork would inherit torch's threads, which do not survive one
    ours, theirs = context.Pipe()
    process = context.Process(target=_work, args=(theirs, task), daemon=True)
    resource_tracker.ensure_running()  # or its own start, inside ours, would let SIGINT through again
    with held_back():
        process.start()
    theirs.close()
    return ours, process


def _received(connection: Connection, process: BaseProcess) -> Any:
    try:
        error, result = connection.recv()
    except (EOFError, OSError) as lost:
        process.join()
        raise WorkerError(
            f"a process ended with code {process.exitcode} before its task was done",
            "give the machine more memory, or use fewer --jobs",
        ) from lost
    if error is not None:
        raise error
    return result


def _work(connection: Connection, task: Callable[..., Any]) -> None:
    """What a process does: a task after the other until nobody is left to ask for one."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _without_semaphores()
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # processes share the cores already
    if "torch" in sys.modules:
        sys.modules["torch"].set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        while True:
            arguments = connection.recv()
            try:
                answer = None, task(*arguments)
            except Exception as error:
                error.add_note("in a process of its own:\n" + "".join(traceback.format_exception(error)))
                answer = error, None
            connection.send(answer)


def _without_semaphores() -> None:
    """tqdm, which torch asks for a progress bar, takes a semaphore to share the terminal with processes of its own; one
    that is killed would leave it behind. These have none, and share nothing."""
    with contextlib.suppress(ImportError):
        tqdm: Any = importlib.import_module("tqdm.std")
        tqdm.TqdmDefaultWriteLock.mp_lock = None


def _end_with_parent() -> None:
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
