"""Compiled kernels on disk, keyed by source, headers and compiler."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from functools import lru_cache
from pathlib import Path

from tilestream.cuda.compile import KernelReport, compile_source, compiler_version
from tilestream.cuda.emit import KernelSource, headers_digest

log = logging.getLogger(__name__)
_memory: dict[str, KernelReport] = {}


def folder() -> Path | None:
    """Where kernels are kept, or None where caching is off (``TILESTREAM_CACHE=0``)."""
    if os.environ.get("TILESTREAM_CACHE", "1") == "0":
        return None
    base = os.environ.get("TILESTREAM_CACHE_DIR")
    return (Path(base) if base else Path.home() / ".cache" / "tilestream") / "kernels"


def compiled(source: KernelSource) -> KernelReport:
    """The kernel from memory, from disk, or from NVRTC; a damaged file is announced and made again.

    Raises:
        CompileError: as ``compile_source``.
    """
    text = f"{headers_digest()}|{compiler_version()}|{source.shared_bytes}|{source.text}"
    key = hashlib.sha256(text.encode()).hexdigest()
    if key not in _memory:
        _memory[key] = _read(key) or _write(key, compile_source(source))
    return _memory[key]


def _read(key: str) -> KernelReport | None:
    where = folder()
    if where is None:
        return None
    try:
        data = json.loads((where / f"{key}.json").read_text())
        cubin = (where / f"{key}.cubin").read_bytes()
        if hashlib.sha256(cubin).hexdigest() != data.pop("digest"):
            raise ValueError("the cubin's digest does not match")
        return KernelReport(cubin=cubin, **data)
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError) as e:
        log.warning("kernel cache entry %s is damaged (%s): compiling again", key[:12], e)
        return None


def _write(key: str, report: KernelReport) -> KernelReport:
    where = folder()
    if where is None:
        return report
    data = {k: getattr(report, k) for k in ("name", "registers", "spills", "stack", "shared_bytes", "seconds", "log")}
    data["digest"] = hashlib.sha256(report.cubin).hexdigest()
    try:
        where.mkdir(parents=True, exist_ok=True)
        _replace(where / f"{key}.cubin", report.cubin)
        _replace(where / f"{key}.json", json.dumps(data).encode())
    except OSError as e:
        _announce(f"the kernel cache at {where} cannot be written ({e}); going on without it")
    return report


@lru_cache(maxsize=8)
def _announce(message: str) -> None:
    log.warning("%s", message)


def _replace(path: Path, data: bytes) -> None:
    """Atomic: another process sees the whole file or none."""
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name)
    try:
        with os.fdopen(handle, "wb") as f:
            f.write(data)
        os.replace(name, path)
    except OSError:
        Path(name).unlink(missing_ok=True)
        raise
