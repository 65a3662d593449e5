"""What every command does alike: errors in one line with exit code 2, tables of one width, JSON files."""

from __future__ import annotations

import functools
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console

from tilestream import interrupts
from tilestream.errors import TilestreamError
from tilestream.interrupts import EXIT_CODE
from tilestream.report.words import WIDTH

out = Console(highlight=False, width=None if sys.stdout.isatty() else WIDTH)


def reported(command: Callable[..., Any]) -> Callable[..., Any]:
    """Errors that tilestream raises on purpose become one line on standard error, and exit code 2; Ctrl-C 130."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            check_writable(kwargs.get("json_"))
            return command(*args, **kwargs)
        except (TilestreamError, OSError, RuntimeError) as failure:
            if interrupts.seen():  # whatever was under way when it came says so in its own words
                interrupts.end()
            error = getattr(failure, "inner_exception", failure)  # torch.compile wraps what a back end raises
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
        OSError: why it cannot.
    """
    if path is None or path.is_fifo():
        return
    new = not path.exists()
    if new:
        path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        if path.is_char_device() and not file.isatty():
            file.write(" ")  # a full device says so only when it is written to; JSON may begin with a space
    if new:
        path.unlink()


def write_json(path: Path | None, result: object) -> None:
    """Write ``result`` as JSON and say so; nothing where ``path`` is None."""
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(plain(result), indent=2, allow_nan=False) + "\n", encoding="utf-8")
    out.print(f"written: {path}")


def plain(value: Any) -> Any:
    """JSON has no infinities and no NaN: they become the strings ``inf``, ``-inf`` and ``nan``."""
    if isinstance(value, dict):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value
