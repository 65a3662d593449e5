"""Compiled entry points. Only these are cached on disk, under a key that changes with any source of the engine."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit

from tilestream.sparse.engine import scheduler
from tilestream.sparse.engine.cells import copy_cells, ld, st
from tilestream.sparse.engine.layout import NODE_WIDTH, D, P, Q, R
from tilestream.sparse.engine.table import FREE, find

log = logging.getLogger(__name__)


def _stamp() -> int:
    """A checksum of the engine's sources: numba itself looks at one file only to see whether its cache is stale."""
    found = 0
    for path in sorted(Path(__file__).parent.rglob("*.py")):
        found = zlib.crc32(path.read_bytes(), found)
    return found


def cached(function: Callable[..., Any]) -> Callable[..., Any]:
    """``numba.njit``, kept on disk where some folder can be written; else compiled once a process, with a warning."""
    try:
        return njit(cache=True)(function)
    except RuntimeError as error:  # numba's, where it finds no folder
        log.warning("compiled code is not kept on disk: %s; set NUMBA_CACHE_DIR to a folder to write to", error)
        return njit(function)


def _entries(stamp: int) -> tuple[Callable[..., Any], ...]:
    @cached
    def go(queue: int, calls: int) -> tuple[int, int]:
        if calls == -stamp - 1:  # only so that the key holds the stamp
            return 0, 0
        return scheduler.run_until_quiet(queue, calls)

    @cached
    def settle(queue: int, node: int) -> bool:
        if node == -stamp - 1:
            return False
        return scheduler.settle(queue, node)

    @cached
    def rehash(node: int, keys: int, values: int, size: int) -> None:
        if node == -stamp - 1:
            return
        width = ld(node, NODE_WIDTH)
        for slot in range(size):
            key = ld(keys, slot)
            if key != FREE:
                to = find(ld(node, P), ld(node, R), key, ld(node, D) > 1)
                st(ld(node, P), to, key)
                copy_cells(values + 8 * width * slot, ld(node, Q) + 8 * width * to, width)

    return go, settle, rehash


go, settle, rehash = _entries(_stamp())
