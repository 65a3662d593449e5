"""Our device library: the headers that generated kernels include, and their digest for caches."""

from __future__ import annotations

import hashlib
from functools import lru_cache
from importlib.resources import files


def headers() -> dict[str, str]:
    """Our device library, by file name."""
    return {name.decode(): text.decode() for name, text in included()}


@lru_cache(maxsize=1)
def included() -> tuple[tuple[bytes, bytes], ...]:
    """Name and text of each header, read once a process. Threads that compile kernels must not read files: each call
    gives the interpreter back, and a main thread that computes lets them have it again only after 5 ms."""
    folder = files("tilestream.kernels") / "include"
    return tuple((f.name.encode(), f.read_text().encode()) for f in folder.iterdir() if f.name.endswith(".cuh"))


@lru_cache(maxsize=1)
def headers_digest() -> str:
    return hashlib.sha256("".join(f"{k}{v}" for k, v in sorted(headers().items())).encode()).hexdigest()
