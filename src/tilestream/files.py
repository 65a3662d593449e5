"""Files that are there whole or not at all: those that users ask for, and those of the caches."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from pathlib import Path

from tilestream.errors import OptionError

log = logging.getLogger(__name__)

_full: set[tuple[str, Path]] = set()  # what is kept in which folder that could not be written: said once a process


def write(path: Path, content: str | bytes) -> Path:
    """Write ``content`` to ``path``, as UTF-8 where it is text, and return it; missing folders are made.

    A new file takes the place of an old one only when all of it is written, so that a reader never sees half a file and
    a full disk costs nothing that was there. What is no ordinary file (a pipe, ``/dev/stdout``) is written to as it is.

    Raises:
        OptionError: it cannot be written: names the file and why.
    """
    data = content.encode() if isinstance(content, str) else content
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.exists() and not path.is_file():
            path.write_bytes(data)
        else:
            _replace(path.resolve(), data)
    except OSError as error:
        remedy = "free some space, or name a file on another disk" if _is_full(error) else "name a file you may write"
        raise OptionError(f"{path} cannot be written: {error.strerror or error}", remedy) from error
    return path


def keep(path: Path, data: bytes, what: str) -> bool:
    """Write a file of a cache, in a folder of its kind; that the cache's folder cannot be written is said once.

    Args:
        what: begins the warning, ``plans are not kept:``.

    Returns:
        Whether it was written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _replace(path, data, own=True)
    except OSError as error:
        folder = path.parents[1]
        if (what, folder) not in _full:
            _full.add((what, folder))
            log.warning(
                "%s %s cannot be written (%s). Remedy: set TILESTREAM_CACHE_DIR or the option cache_dir "
                "to a folder with room, or cache=False", what, folder, error,
            )  # fmt: skip
        return False
    return True


def _replace(path: Path, data: bytes, own: bool = False) -> None:
    """``own``: for this user alone, whatever the process's mask, which one thread cannot read without others' files."""
    try:
        handle, fresh = tempfile.mkstemp(prefix=f".{path.name[:100]}.", dir=path.parent)
    except PermissionError:
        if not path.exists():
            raise
        path.write_bytes(data)  # a file that may be written, in a folder that may not
        return
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        if not own:
            Path(fresh).chmod(path.stat().st_mode & 0o7777 if path.exists() else 0o666 & ~_umask())
        Path(fresh).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(fresh).unlink()
        raise


def _umask() -> int:
    """Python can read it only by setting it."""
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


def _is_full(error: OSError) -> bool:
    import errno

    return error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
