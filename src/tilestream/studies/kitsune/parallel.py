"""Independent tasks on all cores, or on whatever joblib back end the caller has set (Dask, Ray)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from typing import Any, TypeVar

from tilestream.studies.workers import spread

T = TypeVar("T")


def each(
    task: Callable[..., T],
    arguments: Sequence[tuple[Any, ...]],
    jobs: int,
    progress: Callable[[str], None],
    said: Callable[[T], str],
    about: Callable[..., str],
) -> Iterable[T]:
    """Results of ``task(*a)`` for each of ``arguments``, as they come; a line of progress before and after each.

    ``jobs`` is the number of processes, -1 for one a core; one task or one job stays in this process. ``about(*a)``
    names a task, ``said(result)`` what it came to. Around the call, ``joblib.parallel_config(backend=...)`` picks
    another back end, such as Dask's or Ray's.
    """
    count = min(os.cpu_count() or 1 if jobs < 0 else jobs, len(arguments))

    def started(index: int) -> None:
        progress(f"started {about(*arguments[index])}")

    elsewhere = _other_back_end()
    if elsewhere is not None:
        progress(f"{len(arguments)} tasks on {type(elsewhere).__name__}")
        found: Iterator[T] = _joblib(task, arguments, jobs, elsewhere)
    elif count <= 1:
        found = _here(task, arguments, started)
    else:
        progress(f"{len(arguments)} tasks on {count} processes")
        found = spread(task, arguments, count, started)
    with closing(found):  # type: ignore[type-var]
        for done, result in enumerate(found, start=1):
            progress(f"{done} of {len(arguments)}: {said(result)}")
            yield result


def _here(task: Callable[..., T], arguments: Sequence[tuple[Any, ...]], started: Callable[[int], None]) -> Iterator[T]:
    for index, a in enumerate(arguments):
        started(index)
        yield task(*a)


def _other_back_end() -> Any:
    """The joblib back end that the caller has set; None where it is joblib's default, for which there is ours."""
    from joblib.parallel import BACKENDS, DEFAULT_BACKEND, get_active_backend

    backend, _ = get_active_backend()
    return None if isinstance(backend, BACKENDS[DEFAULT_BACKEND]) else backend


def _joblib(task: Callable[..., T], arguments: Sequence[tuple[Any, ...]], jobs: int, backend: Any) -> Iterator[T]:
    import joblib

    one_by_one = getattr(backend, "supports_return_generator", False)  # not every cluster's back end can
    pool = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered" if one_by_one else "list")
    found: Any = pool(joblib.delayed(_single)(os.getpid(), task, a) for a in arguments)
    yield from found


def _single(parent: int, task: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    """One thread a process: processes share the cores already."""
    if os.getpid() != parent:
        import torch

        torch.set_num_threads(1)
    return task(*arguments)
