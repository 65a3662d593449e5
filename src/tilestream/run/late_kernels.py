"""Inductor's code of a graph before its kernels are there: they are compiled by processes, which code waits for."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any


@contextlib.contextmanager
def waiting_later() -> Iterator[list[Callable[[], None]]]:
    """What this thread compiles inside does not wait for its kernels; the list gets what does.

    A module of Inductor's code ends with ``AsyncCompile.wait(globals())``, which puts kernels in the places of futures:
    until that is called, the code must not run. Other threads' code waits as always.
    """
    from torch._inductor.async_compile import AsyncCompile

    waits: list[Callable[[], None]] = []
    wait, thread = AsyncCompile.wait, threading.get_ident()

    def later(compiler: AsyncCompile, scope: dict[str, Any]) -> None:
        if threading.get_ident() == thread:
            waits.append(partial(wait, compiler, scope))
        else:
            wait(compiler, scope)

    AsyncCompile.wait = later
    try:
        yield waits
    finally:
        AsyncCompile.wait = wait
