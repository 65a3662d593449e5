"""What every command does alike: errors in one line with exit code 2, tables of one width, JSON files."""

from __future__ import annotations

import functools
import json
import math
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from tilestream import files, interrupts
from tilestream.errors import OptionError, TilestreamError
from tilestream.interrupts import EXIT_CODE
from tilestream.report.words import WIDTH

out = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else WIDTH)
"""What commands print on. It takes text as it is: a user's name may have ``[red]`` or ``:ok:`` in it."""
FILES, FOLDER = ("json_", "html", "kernel_file", "plot", "timeline", "output"), "folder"
"""Parameters of commands that are written to: files, and a folder."""
NO_MEMORY = ("can't allocate memory", "CUDA out of memory")
"""How torch says so, in a RuntimeError."""


def reported(command: Callable[..., Any]) -> Callable[..., Any]:
    """Errors that tilestream raises on purpose become one line on standard error, and exit code 2; Ctrl-C 130."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            for name in FILES:
                check_writable(kwargs.get(name))
            check_folder(kwargs.get(FOLDER))
            return command(*args, **kwargs)
        except (TilestreamError, OSError, RuntimeError, MemoryError) as failure:
            if interrupts.seen():  # whatever was under way when it came says so in its own words
                interrupts.end()
            error = getattr(failure, "inner_exception", failure)  # torch.compile wraps what a back end raises
            error = no_memory(error) or error
            if kwargs.get("debug") or not isinstance(error, (TilestreamError, OSError)):
                raise
            Console(stderr=True, highlight=False).print(f"error: {error}", markup=False, soft_wrap=True)
            raise typer.Exit(2) from None
        except KeyboardInterrupt:
            Console(stderr=True, highlight=False).print("interrupted", markup=False)
            raise typer.Exit(EXIT_CODE) from None

    return run


def check_writable(path: Path | None) -> None:
    """Fail now, and not after minutes of work, where ``path`` cannot be written; an empty file is not left behind.

    Raises:
        OptionError: why it cannot.
    """
    if path is None or path.is_fifo():
        return
    new = not path.exists()
    try:
        if new:
            path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            if path.is_char_device() and not file.isatty():
                file.write(" ")  # a full device says so only when it is written to; JSON may begin with a space
    except OSError as error:
        raise OptionError(f"{path} cannot be written: {error.strerror}", "name a file that you may write") from error
    if new:
        path.unlink()


def check_folder(path: Path | None) -> None:
    """The same for a folder that files are to be written into.

    Raises:
        OptionError: why they cannot.
    """
    if path is None or (path.is_dir() and os.access(path, os.W_OK)):
        return
    try:
        path.mkdir(parents=True)
        path.rmdir()
    except OSError as error:
        why = "it is no folder" if path.is_file() else "it may not be written" if path.exists() else error.strerror
        raise OptionError(f"no files can be put into {path}: {why}", "name a folder that you may write to") from error


def no_memory(error: BaseException) -> OptionError | None:
    """In words of ours that what was asked for does not fit this machine; None where ``error`` is another matter."""
    if isinstance(error, MemoryError) or any(words in str(error) for words in NO_MEMORY):
        said = re.search(r"tried to allocate [\d.]+ \w+", str(error), re.IGNORECASE)
        remedy = "give fewer --rows or a smaller --size; explain and simulate compute nothing and take any"
        what = f": torch {said[0].lower()}" if said else ""
        return OptionError(f"there is no memory for the model and its inputs{what}", remedy)
    return None


def write_json(path: Path | None, result: object) -> None:
    """Write ``result`` as JSON and say so; nothing where ``path`` is None."""
    if path is None:
        return
    files.write(path, json.dumps(plain(result), indent=2, allow_nan=False) + "\n")
    out.print(f"written: {path}")


def plain(value: Any) -> Any:
    """JSON has no infinities and no NaN: they become the strings ``inf``, ``-inf`` and ``nan``."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
