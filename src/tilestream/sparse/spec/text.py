"""Streams as the papers write them: ``0 1 S0 2 N S1 D``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from tilestream.errors import SparseError
from tilestream.sparse.stream.tokens import DONE, EMPTY, show, stop


def read(text: str, values: bool = False) -> list[tuple[int, Any]]:
    """The (tag, value) tokens of a line. Of a value stream, numbers are values; else they are tags.

    In a line of repeat signals, R is an element and S any stop.

    Raises:
        SparseError: a word that is no token.
    """
    return [_token(word, values) for word in text.split()]


def write(tokens: Iterable[Sequence[Any]], values: bool = False) -> str:
    """The line of (tag, value) tokens."""
    return " ".join(f"{token[1]:g}" if values and token[0] >= 0 else show(token[0]) for token in tokens)


def _token(word: str, values: bool) -> tuple[int, Any]:
    if word in ("D", "N"):
        return (DONE if word == "D" else EMPTY, 0.0)
    if word == "R":
        return (0, 0.0)
    if word.startswith("S") and word[1:].isdigit() or word == "S":
        return (stop(int(word[1:] or 0)), 0.0)
    try:
        return (0, float(word)) if values else (int(word), 0.0)
    except ValueError:
        raise SparseError(
            f"{word!r} is no token", "write numbers, N, S0, S1, ..., D, and R and S for signals"
        ) from None
