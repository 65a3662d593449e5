"""Independent tasks on all cores, or on whatever joblib back end the caller has set (Dask, Ray)."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

T = TypeVar("T")


def each(
    task: Callable[..., T],
    arguments: Sequence[tuple[Any, ...]],
    jobs: int,
    progress: Callable[[str], None],
    said: Callable[[T], str],
) -> Iterable[T]:
    """Results of ``task(*a)`` for each of ``arguments``, as they come; a line of progress after each.

    ``jobs`` is the number of processes, -1 for one a core; one task or one job stays in this process. Around the call,
    ``joblib.parallel_config(backend=...)`` picks another back end, such as Dask's or Ray's.
    """
    if jobs == 1 or len(arguments) == 1:
        found: Iterable[T] = (task(*a) for a in arguments)
    else:
        found = _parallel(task, arguments, jobs)
    for done, result in enumerate(found, start=1):
        progress(f"{done} of {len(arguments)}: {said(result)}")
        yield result


def _parallel(task: Callable[..., T], arguments: Sequence[tuple[Any, ...]], jobs: int) -> Iterable[T]:
    import joblib
    from joblib.parallel import get_active_backend

    backend, _ = get_active_backend()
    one_by_one = getattr(backend, "supports_return_generator", False)  # not every cluster's back end can
    pool = joblib.Parallel(n_jobs=jobs, return_as="generator_unordered" if one_by_one else "list")
    return pool(joblib.delayed(_single)(os.getpid(), task, a) for a in arguments)  # pyright: ignore[reportReturnType]


def _single(parent: int, task: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    """One thread a process: processes share the cores already."""
    if os.getpid() != parent:
        import torch

        torch.set_num_threads(1)
    return task(*arguments)
