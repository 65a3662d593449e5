"""How Inductor's code waits for its kernels, which its processes compile: later, or for all of them at once."""

from __future__ import annotations

import contextlib
import contextvars
import logging
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

log = logging.getLogger(__name__)

THREADS = 8
"""That finish kernels side by side: where the interpreter and the driver let them."""

_asked = threading.local()  # ``of``: what is called with a wait of this thread's, where something is
_listening = threading.Lock()


@contextlib.contextmanager
def waiting_later() -> Iterator[list[Callable[[], None]]]:
    """What this thread compiles inside does not wait for its kernels; the list gets what does.

    A module of Inductor's code ends with ``AsyncCompile.wait(globals())``, which puts kernels in the places of futures:
    until that is called, the code must not run. Other threads' code waits as always.
    """
    from torch._inductor.async_compile import CompiledTritonKernels

    waits: list[Callable[[], None]] = []
    try:
        with _instead(lambda wait: waits.append(wait)):
            yield waits
    finally:
        CompiledTritonKernels.cache_clear()  # what is not finished yet must be no other code's kernel too


@contextlib.contextmanager
def finished_together() -> Iterator[None]:
    """Kernels of what this thread compiles inside are finished side by side.

    Of a kernel that comes from a process, Triton's code is loaded, and where it sums over rows and takes many registers
    it is compiled once more for fewer rows at a time, one kernel after another: 1.9 of 26 s of GraphCast's first call.
    """
    with _instead(lambda wait: (_finish(wait.args[1]), wait())):
        yield


def _finish(scope: dict[str, Any]) -> None:
    """Put kernels in the places of their futures in ``scope``, as ``AsyncCompile.wait`` does, those that can be."""
    from torch._inductor import config
    from torch._inductor.codecache import LambdaFuture

    most_s = getattr(config, "compile_worker_wait_timeout", 0)  # the user's; torch before 2.12 has none
    how = {"timeout": most_s} if most_s else {}
    left = {name: value for name, value in scope.items() if isinstance(value, LambdaFuture)}
    if len(left) < 2:
        return

    def finish(name: str) -> None:
        try:
            scope[name] = left[name].result(**how)
        except Exception as failure:
            log.debug("%s is waited for again, which will say why", name, exc_info=failure)

    first, *others = left
    finish(first)  # what is imported for the first is there for the others
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1), "tilestream-kernels") as threads:
        for name in others:
            threads.submit(contextvars.copy_context().run, finish, name)  # threads do not inherit a context


@contextlib.contextmanager
def _instead(of: Callable[[partial[None]], object]) -> Iterator[None]:
    """Where code that this thread compiles inside would wait, call ``of`` with what waits."""
    _listen()
    before = getattr(_asked, "of", None)
    _asked.of = of
    try:
        yield
    finally:
        _asked.of = before


def _listen() -> None:
    """Have ``AsyncCompile.wait`` ask this thread's ``of``: for good, as threads come and go in any order; again where
    somebody has put another in its place."""
    from torch._inductor.async_compile import AsyncCompile

    with _listening:
        wait = AsyncCompile.wait
        if getattr(wait, "asks", False):
            return

        def asking(self: AsyncCompile, scope: dict[str, Any]) -> None:
            of = getattr(_asked, "of", None)
            if of is None:
                wait(self, scope)
            else:
                of(partial(wait, self, scope))

        asking.asks = True  # pyright: ignore[reportFunctionMemberAccess]
        AsyncCompile.wait = asking
