"""Compiled kernels on disk, keyed by source, headers and compiler."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from tilestream.cuda.compile import KernelReport, compile_source, compiler_version
from tilestream.cuda.emit import KernelSource, headers_digest
from tilestream.options import default_cache_folder

log = logging.getLogger(__name__)
_memory: dict[str, KernelReport] = {}
_announced: set[str] = set()


_asked: ContextVar[tuple[Path | None] | None] = ContextVar("kernel cache folder", default=None)


@contextmanager
def keep_in(base: Path | None) -> Iterator[None]:
    """Kernels compiled inside are kept under ``base``, or nowhere if it is None: the options of one compilation."""
    token = _asked.set((base,))
    try:
        yield
    finally:
        _asked.reset(token)


def folder() -> Path | None:
    """Where kernels are kept, or None where caching is off (``keep_in(None)``, ``TILESTREAM_CACHE=0``)."""
    if os.environ.get("TILESTREAM_CACHE", "1") == "0":
        return None
    asked = _asked.get()
    if asked is not None:
        return asked[0] / "kernels" if asked[0] is not None else None
    return default_cache_folder() / "kernels"


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
        if not isinstance(data, dict):
            raise ValueError(f"it holds {type(data).__name__}, not a report")
        cubin = (where / f"{key}.cubin").read_bytes()
        if hashlib.sha256(cubin).hexdigest() != data.pop("digest"):
            raise ValueError("the cubin's digest does not match")
        return KernelReport(cubin=cubin, **data)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, TypeError, KeyError) as e:
        log.warning("kernel cache entry %s cannot be used (%s): compiling again", where / key[:12], e)
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
        _announce(
            str(where),
            f"kernels are not kept: {where} cannot be written ({e}). Remedy: set TILESTREAM_CACHE_DIR or the option "
            "cache_dir to a folder with room, or cache=False",
        )
    return report


def _announce(about: str, message: str) -> None:
    """Once a process for each folder."""
    if about not in _announced:
        _announced.add(about)
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
