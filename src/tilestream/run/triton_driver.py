"""Triton's driver, begun before Inductor asks for it."""

from __future__ import annotations

import logging
import threading
from functools import lru_cache

log = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def begin_driver() -> None:
    """Have a thread make Triton's driver, once a process.

    A process without Triton's cache waits half a second for the C compiler there, on an H200's host, when Inductor
    first asks what the GPU can do. Whoever asks while it is being made makes another one, as without this.
    """
    try:
        # Here: two threads that import a package may see it half made.
        from triton.runtime import driver  # pyright: ignore[reportMissingImports]
    except ImportError:
        return
    threading.Thread(target=_make, args=(driver,), name="triton-driver", daemon=True).start()


def _make(driver: object) -> None:
    try:
        driver.active  # pyright: ignore  # noqa: B018
    except Exception as failure:
        log.debug("Triton has no driver; who needs it is told why", exc_info=failure)
