"""Kernels that run beside those of pipelines: copies of weights, sums of messages. Each is a header, kept on disk."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from tilestream.cuda import driver
from tilestream.cuda.cache import compiled


@dataclass(frozen=True)
class BesideSource:
    """One kernel: a ``compile.Source`` without warps of its own kinds, so that there are no registers to split."""

    name: str
    text: str
    shared_bytes: int = 0
    register_splits: tuple[tuple[int, int], ...] = ((0, 0),)


@lru_cache(maxsize=32)
def function(name: str, text: str, device_index: int, shared_bytes: int = 0) -> driver.Function:
    """The kernel ``name`` of ``text``, compiled or found on disk, on a device."""
    driver.ensure_context(device_index)
    return driver.Function(compiled(BesideSource(name, text, shared_bytes)).cubin, name, shared_bytes)
