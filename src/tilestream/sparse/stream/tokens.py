"""Tokens of a stream, as numbers: the one encoding that the specification, the engine and the tests share.

A stream is two arrays of one length: ``tags``, int64, and (value streams only) ``vals``, float64 [n] or
[n, block, block]. A tag of 0 or more is an element: the coordinate, the reference, or, in a value stream, 0. Negative
tags are control.
"""

from __future__ import annotations

EMPTY = -1  # N: an operand that a union does not have here
DONE = -2  # D: the last token
S0 = -3  # a stop; S1 is -4, and so on


def stop(level: int) -> int:
    """The tag of S``level``: ``level + 1`` fibers end at once."""
    return S0 - level


def is_stop(tag: int) -> bool:
    return tag <= S0


def stop_level(tag: int) -> int:
    """The level n of a tag that is S``n``."""
    return S0 - tag


def show(tag: int) -> str:
    """As the papers write it: ``3``, ``S0``, ``N``, ``D``."""
    if tag >= 0:
        return str(tag)
    return {EMPTY: "N", DONE: "D"}.get(tag) or f"S{stop_level(tag)}"
