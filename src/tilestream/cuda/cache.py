"""Compiled kernels in memory and on disk, keyed by source, headers and compiler; several are compiled side by side."""

from __future__ import annotations

import contextvars
import hashlib
import json
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from pathlib import Path

from tilestream.cuda.building import Building
from tilestream.cuda.compile import KernelReport, Source, compiler_package
from tilestream.cuda.workers import NOW
from tilestream.files import keep
from tilestream.kernels.parts.headers import headers_digest
from tilestream.options import default_cache_folder

log = logging.getLogger(__name__)
_memory: dict[str, Future[KernelReport]] = {}
_building: dict[str, Building] = {}


_asked: ContextVar[tuple[Path | None] | None] = ContextVar("kernel cache folder", default=None)


def forget() -> None:
    """Know of no kernel, as a new process. Those that threads of this process compile are
    compiled again by whoever asks for them."""
    for known in (_memory, _building):
        known.clear()


os.register_at_fork(after_in_child=forget)  # the threads that compile stay behind


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


def compile_ahead(sources: Sequence[Source], rank: int = 0) -> None:
    """Begin to compile those that are neither known nor on disk, side by side; ``compiled`` waits for them.

    Args:
        rank: how soon they are wanted: those of a lower one are compiled first, whoever asked first.
    """
    wanted = {key: s for s in sources if (key := _key(s)) not in _memory}
    for key in list(wanted):
        if (found := _read(key)) is not None:
            _memory[key] = _known(found)
            del wanted[key]
    for key, source in wanted.items():
        building = Building(source, _keep_as(key), rank)
        _memory[key] = building.made
        _building[key] = building


def _keep_as(key: str) -> Callable[[KernelReport], KernelReport]:
    """What writes a report to the folder of now: threads do not inherit a context, and the folder is in it."""
    context = contextvars.copy_context()
    return lambda report: context.run(_write, key, report)


def begun(sources: Sequence[Source], rank: int = 0) -> list[Future[KernelReport]]:
    """What will hold their kernels, as ``compile_ahead`` makes them; those that wait behind ``rank``
    are hurried."""
    compile_ahead(sources, rank)
    keys = [_key(source) for source in sources]
    for key in keys:
        if not _memory[key].done() and key in _building:
            _building[key].hurry(rank)
    return [_memory[key] for key in keys]


def compiled(source: Source, timeout_s: float | None = None) -> KernelReport:
    """The kernel from memory, from disk, or from NVRTC; a damaged file is announced and made again.

    Raises:
        CompileError: no split of a kernel's registers compiles, as ``compile_text`` says.
        TimeoutError: NVRTC has not finished after ``timeout_s`` seconds; it goes on in the background.
    """
    key = _key(source)
    (made,) = begun([source], NOW)
    try:
        return made.result(timeout_s)
    finally:
        if made.done():
            _building.pop(key, None)
            if made.exception() is not None:
                _memory.pop(key, None)  # whoever asks again may have mended the installation


def _key(source: Source) -> str:
    return _digest(headers_digest(), compiler_package(), source.shared_bytes, source.text)


@lru_cache(maxsize=1024)  # a kernel is asked for at every wait for others
def _digest(*parts: object) -> str:
    return hashlib.sha256("|".join(map(str, parts)).encode()).hexdigest()


def _known(report: KernelReport) -> Future[KernelReport]:
    made: Future[KernelReport] = Future()
    made.set_result(report)
    return made


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
    said = "kernels are not kept:"
    if keep(where / f"{key}.cubin", report.cubin, said):
        keep(where / f"{key}.json", json.dumps(data).encode(), said)
    return report
